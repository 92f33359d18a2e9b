"""`headrace demo`: a tour that kills an engine in the middle of a stream.

Imports up, chat, engine_inside and processes.
"""
