"""Loads a checkpoint onto its device; chooses dtype, attention backend and operators.

Imports autotune, models and the subpackages below them.
"""
