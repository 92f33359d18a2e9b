"""The terminal chat.

Imports sse, word_wrap, tables and errors.
"""
