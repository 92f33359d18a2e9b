"""What the engine's subpackages pass on: requests, steps, outputs, configuration, errors.

Imports no other subpackage.
"""
