"""The queue: its two sides as interfaces (`base`), and the rules between them.

Imports wire, sealing, text and structured.
"""
