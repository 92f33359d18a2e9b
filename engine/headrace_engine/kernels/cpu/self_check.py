"""Checks on this machine, with a small product, that a library's products are right.

It is used for instruction sets with their own registers, which hypervisors and emulators may handle
wrongly.
"""

import torch

from .executor import Executor
from .library import Kernels

# More rows than a tile has, not a multiple of it, and several tiles of inputs and outputs.
ROWS, INPUTS, OUTPUTS = 37, 96, 192
# For results near 10: bfloat16 inputs are exact, sums in float32 differ in their last bits.
TOLERANCE = 1e-3


def multiplies_correctly(kernels: Kernels) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, INPUTS, generator=generator).bfloat16()
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator).bfloat16()
    executor = Executor(kernels, threads=1)
    found = executor.linear(executor.pack([weight], [], quantize=False), x)
    return bool(torch.allclose(found, x.float() @ weight.float().T, atol=TOLERANCE))
