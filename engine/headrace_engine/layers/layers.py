"""Linear layers. The constructor lays weights out for the machine once.

On CPUs that oneDNN supports, weights are reordered for its matrix products (several times faster
for few rows than the plain layout) and the plain copy is freed; otherwise torch's own linear is
used.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch.nn import functional as F

# Rows for which oneDNN optimises the layout; a layout works for any number of rows.
PACKED_ROWS = 256


class Linear(Protocol):
    """Maps x [..., in] to [..., out]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class ActivatedLinear(Linear, Protocol):
    """A layer that can include the activation of a gated MLP, if its outputs are gate and up."""

    def mark_gated(self) -> None:
        """Says that the outputs are gate and up."""

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of x [..., in]: [..., out / 2]."""


def over_rows(
    x: torch.Tensor, outputs: int, launch: Callable[[torch.Tensor, torch.Tensor], None]
) -> torch.Tensor:
    """Calls `launch(output [T, outputs], rows [T, in])` for the rows of x [..., in] and returns the
    output.

    A row's elements are adjacent; `launch` is not called if there are no rows.
    """
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    output = rows.new_empty(len(rows), outputs)
    if len(rows):
        launch(output, rows)
    return output.view(*x.shape[:-1], outputs)


class PlainLinear:
    """A layer that uses torch's own product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """A layer in oneDNN's layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return product


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Makes the fastest layer for a weight [out, in] on its device. The caller drops its
    `weight`."""
    if can_pack(weight.device, weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype is torch.float32:
        return True
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
