"""The path between client and engine, measured piece by piece: see benchmarks/path.py."""
