"""API keys and sealing keys, in files that are changed in one step.

Imports tables.
"""
