"""Request bodies, as pydantic checks them.

Imports limits.
"""
