"""The wire format: versioned, checked msgpack; and every Redis key.

Imports sampling and structured.
"""
