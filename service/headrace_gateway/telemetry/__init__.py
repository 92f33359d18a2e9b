"""What is measured: metrics, and the observation of one request.

Imports limits and queue_client.
"""
