"""Recurrent states: their shapes, their places in KV blocks, and the states of a step's batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

# Bytes to which each tensor of a state is padded.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer's state, for one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The size of the tensor with padding."""
        return -(-prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Lays the states of `layers` equal layers out over the blocks of `places` KV layers.

    A block has `block_bytes` in each place. The state of layer n is in place n % `places`, in the
    n / `places`th part of the sequence's state blocks.
    """

    tensors: tuple[StateTensor, ...]
    layers: int
    places: int
    block_bytes: int

    @property
    def layer_blocks(self) -> int:
        """The number of blocks that one layer's state takes."""
        return -(-sum(tensor.num_bytes for tensor in self.tensors) // self.block_bytes)

    @property
    def blocks(self) -> int:
        """The number of blocks of one sequence's state."""
        return -(-self.layers // self.places) * self.layer_blocks

    def place(self, layer: int) -> int:
        return layer % self.places

    def part(self, layer: int) -> slice:
        """The part of a sequence's state blocks that the layer uses."""
        first = layer // self.places * self.layer_blocks
        return slice(first, first + self.layer_blocks)


@dataclass(frozen=True, slots=True)
class StateRun:
    """Tokens [begin, end) of the batch, which advance the state of sequence `sequence`.

    The state after them goes to the rows `writes` of StateBatch.targets.
    """

    sequence: int
    begin: int
    end: int
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The states of a ragged batch of S sequences, on the device.

    sources   int64 [S, N]   blocks with the state before each sequence's run; any, if `fresh`.
    fresh     bool [S]       whether the run begins at position 0, with a state of zeros.
    targets   int64 [W, N]   blocks for the states after runs and for snapshots.
    runs                     in the order of the tokens; a sequence with snapshots has several.
    """

    sources: torch.Tensor
    fresh: torch.Tensor
    targets: torch.Tensor
    runs: Sequence[StateRun]
