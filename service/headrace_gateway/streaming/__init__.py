"""Server-sent events, and responses that end when their client hangs up.

Imports telemetry and queue_client.
"""
