"""Kernels in Triton's language for CUDA devices, one module for each stage of a layer.

Only modules that launch kernels import torch. Nothing is tuned while the engine serves: launch
parameters come from one table (`launch`), and no grid needs a number that only the device knows.
"""
