"""Requests that outlive their connection: idempotency keys, stored answers, and where each client's
stream goes on.

Imports openai, anthropic and queue_client.
"""
