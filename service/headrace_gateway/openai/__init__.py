"""Answers of OpenAI's APIs, and the bodies of `/v1/responses`.

Imports parsing, schemas and queue_client.
"""
