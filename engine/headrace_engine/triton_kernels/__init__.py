"""Kernels in Triton's language for CUDA devices, one module for each stage of a layer.

Only the modules that launch them import torch. Nothing here is tuned while it serves: launch
parameters come from one table (`launch`), and no grid needs a number that only the device knows.
"""
