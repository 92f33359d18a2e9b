"""Measures one GPU part by part, each part in its own process: see benchmarks/gpu.py."""
