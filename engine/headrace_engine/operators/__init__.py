"""Element-wise operators and matrix products of decoders behind one protocol (`base`): for CPUs,
for Triton, and batch invariant.

Imports layers and the subpackages below it. Models compute with them.
"""
