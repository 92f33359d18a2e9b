"""Measures the path between client and engine piece by piece: see benchmarks/path.py."""
