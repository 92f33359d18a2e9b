"""Limits on what one request, one connection and one tenant can make the gateway spend.

Imports errors only.
"""
