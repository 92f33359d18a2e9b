"""Structured outputs as grammars, and checks that a grammar compiles within limits.

Imports pools.
"""
