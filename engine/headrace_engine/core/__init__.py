"""Data that the engine's subpackages share: requests, steps, outputs, configuration, errors.

Imports no other subpackage.
"""
