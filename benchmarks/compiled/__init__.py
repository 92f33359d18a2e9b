"""Compiles Triton's kernels without a device and inspects them: see benchmarks/triton_aot.py."""
