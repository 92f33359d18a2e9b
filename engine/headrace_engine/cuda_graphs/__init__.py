"""CUDA graphs of decode steps, recorded for some batch sizes and context lengths.

Imports models and the subpackages below it.
"""
