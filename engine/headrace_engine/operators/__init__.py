"""Element-wise operators, matrix products and recurrences of decoders behind two protocols (`base`,
`recurrent`): for CPUs, for Triton, and batch invariant.

Imports layers and the subpackages below it. Models compute with them.
"""
