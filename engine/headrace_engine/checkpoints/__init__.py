"""A checkpoint's files: configuration, tensors, families of decoders. No code of a checkpoint is
executed.

Imports core.
"""
