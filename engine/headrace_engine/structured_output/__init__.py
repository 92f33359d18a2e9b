"""Grammars compiled for a vocabulary, masks of the tokens that they allow, and limits of reasoning.

Imports core and device.
"""
