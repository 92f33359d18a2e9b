"""Measures at warm-up which kernels and launch parameters are fastest for a model on its GPU.

Imports cuda_graphs, models and the subpackages below them.
"""
