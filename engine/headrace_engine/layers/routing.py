"""The rows that each expert of a mixture computes, as tensors on the device."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Routing:
    """The routing of T tokens to K experts each, on the device.

    weights  float32 [T, K]
    order    int32 [T * K]: pairs (token * K + k), by expert
    tiles    int32 [3, most]: each tile's expert, its begin in `order`, and its expert's end there
    live     int32 [1]: the number of tiles
    """

    weights: torch.Tensor
    order: torch.Tensor
    tiles: torch.Tensor
    live: torch.Tensor
