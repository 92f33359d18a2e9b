"""Puts requests into the queue, returns replies as iterators, takes requests from silent engines.

Imports models.
"""
