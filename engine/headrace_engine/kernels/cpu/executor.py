"""A decoder's step through the native kernels: its threads, its packed weights, one call a step.

Knows nothing of checkpoints or models; must not be used by two threads at once.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from .arena import Arena
from .blocks import BlockMatrix, StoredRows, row_addresses
from .library import Kernels
from .structs import (
    Convolution,
    Decoder,
    Delta,
    Experts,
    Linear,
    Mamba,
    Mamba2,
    PackedPanel,
    Rows,
    States,
    Step,
)

# Elements of the widest vector. The rows of the kernels are multiples of it.
LANES = 16
# Inputs that share a scale when activations are quantised; groups of weights are multiples of it.
GROUP = 64


class QuantizedMatrix(Protocol):
    """weight[o, i] = (values[o, i] - zeros[o, g]) * scales[o, g] for the g-th run of inputs."""

    @property
    def values(self) -> torch.Tensor:
        """uint8 [out, in], below 16"""

    @property
    def scales(self) -> torch.Tensor:
        """[out, groups]"""

    @property
    def zeros(self) -> torch.Tensor:
        """[out, groups]"""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer's weights in the kernels' layout. Weights of 8 bits have `scales`; those of 4
    bits have `scales` and `zeros` in groups of `group` inputs. 4-bit floats have groups and no
    zeros. Weights in the block types of GGUF files have `panels`, which point into `weight`."""

    weight: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    inputs: int
    outputs: int
    zeros: torch.Tensor | None = None
    group: int = 0
    panels: ctypes.Array[PackedPanel] | None = None

    def describe(self) -> Linear:
        """Makes a structure that points into the tensors, which must outlive it."""
        return Linear(
            weight=self.weight.data_ptr(),
            panels=None if self.panels is None else ctypes.addressof(self.panels),
            scales=pointer(self.scales),
            zeros=pointer(self.zeros),
            bias=pointer(self.bias),
            group=self.group,
            inputs=self.inputs,
            outputs=self.outputs,
        )


class Executor:
    """Owns the helper threads and the working memory of steps; both end with this object."""

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

    def gated_delta(
        self, delta: Delta, states: States, output: torch.Tensor, rows: Sequence[torch.Tensor]
    ) -> None:
        """Computes output [T, Hv * V] from the rows [T, ...] mixed, gate, beta and decay."""
        self._recur(self._kernels.gated_delta, delta, states, output, rows)

    def state_space(
        self, mamba: Mamba2, states: States, output: torch.Tensor, rows: Sequence[torch.Tensor]
    ) -> None:
        """Computes output [T, H * P] from the rows [T, ...] mixed, gate and steps."""
        self._recur(self._kernels.state_space, mamba, states, output, rows)

    def selective_scan(
        self, mamba: Mamba, states: States, output: torch.Tensor, rows: Sequence[torch.Tensor]
    ) -> None:
        """Computes output [T, C] from the rows [T, ...] values, steps, gate, B and C."""
        self._recur(self._kernels.selective_scan, mamba, states, output, rows)

    def convolve(
        self,
        convolution: Convolution,
        states: States,
        output: torch.Tensor,
        rows: Sequence[torch.Tensor],
        *,
        silu: bool = False,
    ) -> None:
        """Computes output [T, C] from the rows [T, C] x, or x and the gates before and after it."""
        _dense, described = _describe(rows)
        gates = [ctypes.addressof(gate) for gate in described[1:]] or (None, None)
        if self._kernels.convolve(
            self._handle,
            ctypes.addressof(convolution),
            ctypes.addressof(states),
            output.data_ptr(),
            ctypes.addressof(described[0]),
            *gates,
            silu,
            output.dtype is torch.bfloat16,
        ):
            raise MemoryError("no memory for a convolution")

    def _recur(
        self,
        kernel: Callable[..., int],
        layer: ctypes.Structure,
        states: States,
        output: torch.Tensor,
        rows: Sequence[torch.Tensor],
    ) -> None:
        _dense, described = _describe(rows)
        if kernel(
            self._handle,
            ctypes.addressof(layer),
            ctypes.addressof(states),
            output.data_ptr(),
            *map(ctypes.addressof, described),
            output.dtype is torch.bfloat16,
        ):
            raise MemoryError("no memory for a recurrent layer")

    def linear(
        self, layer: PackedLinear, x: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Computes one layer alone: x [N, in], dense, to [N, out] in float32 or the dtype of x."""
        stride = -(-layer.outputs // LANES) * LANES
        output = torch.empty(len(x), stride, dtype=dtype)
        described = layer.describe()
        if self._kernels.linear_forward(
            self._handle,
            ctypes.addressof(described),
            output.data_ptr(),
            stride,
            x.data_ptr(),
            len(x),
            x.dtype is torch.bfloat16,
            dtype is x.dtype,
        ):
            raise MemoryError("no memory for a linear layer")
        return output[:, : layer.outputs]

    def experts(
        self, layer: Experts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Computes the experts of one layer: x [N, H], each row by its experts `chosen` int64
        [N, K] with `weights` float32 [N, K], all dense, to [N, H]. Numbers of experts that the
        layer does not have add nothing."""
        output = torch.empty_like(x)
        if self._kernels.experts_forward(
            self._handle,
            ctypes.addressof(layer),
            output.data_ptr(),
            x.data_ptr(),
            chosen.data_ptr(),
            weights.data_ptr(),
            len(x),
            x.dtype is torch.bfloat16,
        ):
            raise MemoryError("no memory for a layer's experts")
        return output

    def padded(self, outputs: int) -> int:
        """Number of outputs, padded to whole panels."""
        return -(-outputs // self._kernels.panel) * self._kernels.panel

    def pack(
        self, parts: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], quantize: bool
    ) -> PackedLinear:
        """Packs the stacked weights [out, in] of `parts` as one layer."""
        addresses = np.concatenate([row_addresses(part) for part in parts])
        bias = torch.cat([part.float() for part in biases]) if biases else None
        return self._pack(addresses, parts[0], bias, quantize)

    def pack_gated(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        biases: Sequence[torch.Tensor],
        quantize: bool,
    ) -> PackedLinear:
        """Packs gate and up [inner, in] interleaved by half panels, so that pairs meet in
        registers."""
        half = self._kernels.panel // 2
        addresses = _alternate(row_addresses(gate), row_addresses(up), half)
        bias = None
        if biases:
            gates, ups = (part.float().numpy() for part in biases)
            bias = torch.from_numpy(_alternate(gates, ups, half))
        return self._pack(addresses, gate, bias, quantize)

    def pack_quantized(
        self, weight: QuantizedMatrix, biases: Sequence[torch.Tensor], gated: bool
    ) -> PackedLinear:
        """Like `pack` for weights in 4 bits; like `pack_gated` if they are gates, then ups."""
        bias = torch.cat([part.float() for part in biases]) if biases else None
        order = self._order(len(weight.values), gated)
        outputs, inputs = len(order), weight.values.shape[1]
        width = self.padded(outputs)
        there = np.flatnonzero(order >= 0)
        chosen = torch.from_numpy(order[there])
        rows = np.zeros(width, dtype=np.uint64)
        rows[there] = row_addresses(weight.values)[order[there]]
        packed = self._arena.empty(width * inputs // 2, torch.uint8)
        self._kernels.pack_int4(self._handle, packed.data_ptr(), rows.ctypes.data, width, inputs)

        def placed(values: torch.Tensor) -> torch.Tensor:
            """[out, ...] as [..., width], in the layout's order."""
            found = torch.zeros(*values.shape[1:], width)
            found[..., torch.from_numpy(there)] = values.movedim(0, -1)[..., chosen].float()
            return found

        return PackedLinear(
            weight=packed,
            scales=placed(weight.scales),
            bias=None if bias is None else placed(bias),
            inputs=inputs,
            outputs=outputs,
            zeros=placed(weight.zeros),
            group=inputs // weight.scales.shape[1],
        )

    def pack_floats(
        self, weight: QuantizedMatrix, biases: Sequence[torch.Tensor], gated: bool
    ) -> PackedLinear:
        """Like `pack_quantized` for 4-bit floats (e2m1) in groups of 32, given by their codes."""
        packed = self.pack_quantized(weight, biases, gated)
        assert packed.scales is not None, "values have scales"
        return replace(packed, scales=packed.scales / 2, zeros=None)

    def pack_blocks(
        self,
        parts: Sequence[BlockMatrix | torch.Tensor],
        biases: Sequence[torch.Tensor],
        gated: bool,
        dtype: torch.dtype,
    ) -> PackedLinear:
        """Like `pack` for matrices in the block types of GGUF files, which keep their bits; like
        `pack_gated` if they are gates, then ups. Floats among them have `dtype`."""
        stored = StoredRows(parts, dtype)
        order = self._order(len(stored), gated)
        outputs, inputs = len(order), stored.inputs
        width = self.padded(outputs)
        order = np.pad(order, (0, width - outputs), constant_values=-1)
        kinds = stored.panel_kinds(order.reshape(-1, self._kernels.panel))
        addresses = stored.addresses(order, np.repeat(kinds, self._kernels.panel))
        narrow = dtype is torch.bfloat16
        sizes = [self._kernels.panel_bytes(kind, inputs, narrow) for kind in kinds.tolist()]
        weight = self._arena.empty(sum(sizes), torch.uint8)
        places = weight.data_ptr() + np.cumsum([0, *sizes[:-1]])
        panels = (PackedPanel * len(kinds))(*map(PackedPanel, places.tolist(), kinds.tolist()))
        self._kernels.pack_panels(
            self._handle,
            ctypes.addressof(panels),
            len(kinds),
            addresses.ctypes.data,
            inputs,
            narrow,
        )
        bias = None
        if biases:
            there = order >= 0
            bias = torch.zeros(width)
            whole = torch.cat([part.float() for part in biases])
            bias[torch.from_numpy(there)] = whole[torch.from_numpy(order[there])]
        return PackedLinear(weight, None, bias, inputs, outputs, panels=panels)

    def unpack(self, layer: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
        """The weights [out, in] of a layer that `pack_blocks` made for `dtype`, in that dtype."""
        rows = torch.empty(layer.outputs, layer.inputs)
        outputs = torch.arange(layer.outputs)
        self._kernels.unpack_outputs(
            self._handle,
            layer.describe().panels,
            rows.data_ptr(),
            outputs.data_ptr(),
            *rows.shape,
            dtype is torch.bfloat16,
        )
        return rows.to(dtype)

    def _order(self, outputs: int, gated: bool) -> np.ndarray:
        """The row of each packed output; -1 for padding. Gates and ups alternate by half panels."""
        order = np.arange(outputs)
        if not gated:
            return order
        gates, ups = np.split(order + 1, 2)
        return _alternate(gates, ups, self._kernels.panel // 2) - 1

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


def _describe(rows: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Rows]]:
    """Rows whose elements are adjacent, and structures that point into them."""
    dense = [row if row.stride(1) == 1 else row.contiguous() for row in rows]
    return dense, [Rows(data=row.data_ptr(), stride=row.stride(0)) for row in dense]


def _alternate(first: np.ndarray, second: np.ndarray, count: int) -> np.ndarray:
    """`count` elements of `first`, then `count` of `second`, and so on, padded with zeros."""
    blocks = -(-len(first) // count)
    pairs = np.zeros((blocks, 2, count), dtype=first.dtype)
    for place, part in enumerate((first, second)):
        filled = np.zeros(blocks * count, dtype=first.dtype)
        filled[: len(part)] = part
        pairs[:, place] = filled.reshape(blocks, count)
    return pairs.reshape(-1)
