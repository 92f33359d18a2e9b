"""Adapters: their files checked, their weights on a device, the rows of a step that each one
changes.

Imports core, device, kernels and checkpoints.
"""
