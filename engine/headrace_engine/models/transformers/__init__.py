"""Decoders that transformers computes, with this engine's attention."""
