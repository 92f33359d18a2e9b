"""Which rows each expert of a mixture computes, as kernels find it on the device."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Routing:
    """Of T tokens with K experts each, on the device.

    weights  float32 [T, K]
    order    int32 [T * K]: pairs (token * K + k), by expert
    tiles    int32 [3, most]: each one's expert, where in `order` it begins and its expert ends
    live     int32 [1]: how many tiles there are
    """

    weights: torch.Tensor
    order: torch.Tensor
    tiles: torch.Tensor
    live: torch.Tensor
