"""The terminal chat.

Imports errors.
"""
