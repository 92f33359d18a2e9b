"""Formats of quantised checkpoints: AWQ, GPTQ, compressed-tensors, FP8, MXFP4."""
