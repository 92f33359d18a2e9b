"""One GPU, measured part by part, each part in a process of its own: see benchmarks/gpu.py."""
