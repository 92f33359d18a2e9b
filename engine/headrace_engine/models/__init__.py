"""Decoders and encoders made from checkpoints: the native decoder, and all others through
transformers.

Imports attention and the subpackages below it. `PlacedModel` leaves it.
"""
