"""Executes a step: the batch as tensors, the model, the sampler, swapped blocks, adapters, images.

Imports distributed, sampling and the subpackages below them, but not the scheduler.
"""
