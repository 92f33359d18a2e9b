"""CUDA graphs of decode steps and of short steps with prompts, recorded for some sizes.

Imports models and the subpackages below it.
"""
