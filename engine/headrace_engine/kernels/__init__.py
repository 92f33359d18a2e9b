"""Kernels: `cpu` in C++, a whole decoder step in one call; `triton` for CUDA devices.

Imports no other subpackage. `operators` calls them for models.
"""
