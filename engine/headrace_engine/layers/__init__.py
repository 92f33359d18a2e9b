"""Weights of linear layers and of experts, plain and quantised, and their shapes.

Imports kernels, checkpoints and lora.
"""
