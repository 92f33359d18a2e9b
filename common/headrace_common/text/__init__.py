"""Text to token ids and back, incrementally; chat templates; a checkpoint's small files.

Imports sampling.
"""
