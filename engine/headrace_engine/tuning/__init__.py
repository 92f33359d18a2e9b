"""Kernels and launch parameters that are measured on the device before a model serves there.

Only `start` decides whether; nothing here runs while an engine serves.
"""
