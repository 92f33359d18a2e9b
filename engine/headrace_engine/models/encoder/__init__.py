"""Encoders that embed, and how a checkpoint pools hidden states."""
