"""Triton's kernels, compiled without a device and looked at: see benchmarks/triton_aot.py."""
