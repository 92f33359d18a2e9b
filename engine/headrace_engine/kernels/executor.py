"""A decoder's step through the native kernels: its threads, its packed weights, one call a step.

Knows nothing of checkpoints or of what a model is called; must not be used by two threads at once.
"""

import ctypes
import weakref
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

from .arena import Arena
from .library import Kernels
from .structs import Decoder, Linear, Step


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer's weights in the kernels' layout; `scales` where they are 8 bits wide."""

    weight: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    inputs: int
    outputs: int

    def describe(self) -> Linear:
        """Points into the tensors, which must outlive it."""
        return Linear(
            weight=self.weight.data_ptr(),
            scales=pointer(self.scales),
            bias=pointer(self.bias),
            inputs=self.inputs,
            outputs=self.outputs,
        )


class Executor:
    """Owns the helper threads and the working memory of steps; both go with the object."""

    def __init__(self, kernels: Kernels, threads: int) -> None:
        self._kernels, self._arena = kernels, Arena()
        self._handle = kernels.executor_create(threads)
        if not self._handle:
            raise MemoryError("no memory for the executor of native kernels")
        weakref.finalize(self, kernels.executor_destroy, self._handle)

    def forward(self, decoder: Decoder, step: Step) -> None:
        if self._kernels.forward(self._handle, ctypes.addressof(decoder), ctypes.addressof(step)):
            raise MemoryError("no memory for a step's activations")

    def argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index int64 [N] and value float32 [N] of the first largest element of each row."""
        indices, values = torch.empty(len(x), dtype=torch.int64), torch.empty(len(x))
        self._kernels.argmax(
            self._handle,
            indices.data_ptr(),
            values.data_ptr(),
            x.data_ptr(),
            *x.shape,
            x.stride(0),
            x.dtype is torch.bfloat16,
        )
        return indices, values

    def linear(self, layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        """x [N, in], dense, through one layer by itself: float32 [N, out]."""
        output = torch.empty(len(x), self.padded(layer.outputs))
        described = layer.describe()
        if self._kernels.linear_forward(
            self._handle,
            ctypes.addressof(described),
            output.data_ptr(),
            x.data_ptr(),
            len(x),
            x.dtype is torch.bfloat16,
        ):
            raise MemoryError("no memory for a linear layer")
        return output[:, : layer.outputs]

    def padded(self, outputs: int) -> int:
        """Outputs with what fills the last panel."""
        return -(-outputs // self._kernels.panel) * self._kernels.panel

    def pack(
        self, parts: Rows[torch.Tensor], biases: Rows[torch.Tensor], quantize: bool
    ) -> PackedLinear:
        """The weights [out, in] of `parts` below each other, as one layer."""
        addresses = np.concatenate([row_addresses(part) for part in parts])
        bias = torch.cat([part.float() for part in biases]) if biases else None
        return self._pack(addresses, parts[0], bias, quantize)

    def pack_gated(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        biases: Rows[torch.Tensor],
        quantize: bool,
    ) -> PackedLinear:
        """Gate and up [inner, in] in turns of half a panel, so that pairs meet in registers."""
        half = self._kernels.panel // 2
        addresses = _alternate(row_addresses(gate), row_addresses(up), half)
        bias = None
        if biases:
            gates, ups = (part.float().numpy() for part in biases)
            bias = torch.from_numpy(_alternate(gates, ups, half))
        return self._pack(addresses, gate, bias, quantize)

    def _pack(
        self,
        addresses: np.ndarray,
        like: torch.Tensor,
        bias: torch.Tensor | None,
        quantize: bool,
    ) -> PackedLinear:
        outputs, inputs = len(addresses), like.shape[1]
        width = self.padded(outputs)
        rows = np.zeros(width, dtype=np.uint64)
        rows[:outputs] = addresses
        weight = self._arena.empty(width * inputs, torch.uint8 if quantize else like.dtype)
        scales = torch.empty(width) if quantize else None
        self._kernels.pack_weight(
            self._handle,
            weight.data_ptr(),
            pointer(scales),
            rows.ctypes.data,
            width,
            inputs,
            like.dtype is torch.bfloat16,
        )
        if bias is not None:
            bias = torch.nn.functional.pad(bias, (0, width - outputs)).contiguous()
        return PackedLinear(weight, scales, bias, inputs, outputs)


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def row_addresses(matrix: torch.Tensor) -> np.ndarray:
    """uint64 [rows]: where each row of a matrix with contiguous rows begins."""
    assert matrix.stride(1) == 1, "rows must be contiguous"
    step = matrix.stride(0) * matrix.element_size()
    return np.arange(matrix.shape[0], dtype=np.uint64) * np.uint64(step) + np.uint64(
        matrix.data_ptr()
    )


def _alternate(first: np.ndarray, second: np.ndarray, count: int) -> np.ndarray:
    """`count` of the one, `count` of the other, and so on, the ends filled with zeros."""
    blocks = -(-len(first) // count)
    pairs = np.zeros((blocks, 2, count), dtype=first.dtype)
    for place, part in enumerate((first, second)):
        filled = np.zeros(blocks * count, dtype=first.dtype)
        filled[: len(part)] = part
        pairs[:, place] = filled.reshape(blocks, count)
    return pairs.reshape(-1)
