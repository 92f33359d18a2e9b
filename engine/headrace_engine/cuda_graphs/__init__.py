"""CUDA graphs of decode steps and of short steps with prompts, captured for some sizes.

Imports models and the subpackages below it.
"""
