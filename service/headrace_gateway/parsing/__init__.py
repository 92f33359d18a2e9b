"""Reads a chat's text as reasoning, text and tool calls, in the forms that models write.

Imports schemas and models.
"""
