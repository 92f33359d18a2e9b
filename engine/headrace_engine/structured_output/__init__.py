"""Grammars compiled for a vocabulary, and masks of the tokens that they allow.

Imports core and device.
"""
