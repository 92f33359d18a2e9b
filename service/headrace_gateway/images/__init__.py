"""Images that clients send: their bytes, checked in processes that may be killed.

Imports schemas, telemetry and limits. Hands out images whose size is known.
"""
