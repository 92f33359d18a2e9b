"""Flags of `up`, `engine` and `gateway`: read, vLLM's translated, each given to its process.

Imports errors. All is checked before a process starts.
"""
