"""A process's settings, read once; the file of API keys.

Imports observability.
"""
