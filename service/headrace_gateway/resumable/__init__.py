"""Requests that outlive their connection: idempotency keys, stored answers, and where each client's
stream continues.

Imports openai, anthropic and queue_client.
"""
