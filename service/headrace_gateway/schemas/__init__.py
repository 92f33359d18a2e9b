"""Bodies of requests, as pydantic checks them, and of answers, as they are documented.

Imports limits.
"""
