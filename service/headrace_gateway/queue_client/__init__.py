"""Puts requests into the queue, and returns their replies as iterators.

Imports models.
"""
