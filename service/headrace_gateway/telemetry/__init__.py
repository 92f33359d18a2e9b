"""Measurements: metrics, and the observation of one request.

Imports limits and queue_client.
"""
