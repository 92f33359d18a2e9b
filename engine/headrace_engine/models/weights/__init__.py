"""Reads a checkpoint's tensors under the names of the native decoder."""
