"""Makes a decoder's linear layers from a checkpoint, each in the fastest supported form.

On CPUs with native kernels: their layout, in the engine's dtype or in 8 bits. On GPUs: Triton's
kernels, which unpack weights while they multiply. Elsewhere quantised matrices are dequantised for
each product, and all others use torch's own layers.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch.nn import functional as F

from ...core.errors import ConfigError
from ...kernels.cpu.blocks import KINDS
from ...kernels.cpu.executor import GROUP, LANES, Executor
from ...kernels.cpu.library import DTYPES
from ...layers.expert_weights import (
    ExpertWeights,
    GroupedWeight,
    Names,
    read_experts,
    read_packed_weights,
)
from ...layers.float8_linear import make_float8, supports_float8
from ...layers.float8_weight import Float8Weight
from ...layers.layers import Linear, can_pack, make_linear
from ...layers.layers import PackedLinear as MkldnnLinear
from ...layers.quantized_weight import QuantizedWeight, round_weight
from ...operators.base import Ops
from ...operators.cpu import NativeOps
from ..weights.weights import WeightReader
from .native_linear import NativeLinear

Part = TypeVar("Part", QuantizedWeight, Float8Weight)

NO_INT8 = (
    "quantization int8 needs the native CPU kernels, in bfloat16 or float32, or a native model on "
    "a GPU: use quantization none"
)


class QuantizedLinear:
    """Keeps weights in 4 or 8 bits and dequantises them for each product; small, not fast."""

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._bias, self._inputs = bias, weight.shape[1]
        self._halves = weight.bits <= 4 and self._inputs % 2 == 0
        values = weight.values
        if self._halves:
            values = values[:, 0::2] | (values[:, 1::2] << 4)
        self._values = values.contiguous().to(device)
        self._groups = None if weight.groups is None else weight.groups.to(device)
        self._scales = weight.scales.to(device=device, dtype=dtype)
        self._zeros = weight.zeros.to(device=device, dtype=dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight(), self._bias)

    def _weight(self) -> torch.Tensor:
        values = self._values
        if self._halves:
            values = torch.stack((values & 15, values >> 4), dim=-1).flatten(1)
        whole = values.to(self._scales.dtype)
        if self._groups is not None:
            return (whole - self._zeros[:, self._groups]) * self._scales[:, self._groups]
        grouped = whole.view(*self._scales.shape, -1)
        return ((grouped - self._zeros[..., None]) * self._scales[..., None]).view(whole.shape)


def computes_natively(ops: Ops, dtype: torch.dtype) -> bool:
    """Whether the native kernels compute linear layers of this dtype."""
    return isinstance(ops, NativeOps) and dtype in DTYPES


def pack_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, executor: Executor | None, quantize: bool
) -> Linear | None:
    """A loaded layer in the fastest supported layout; None if only torch's own layer supports
    it."""
    if executor is not None and weight.dtype in DTYPES and weight.shape[1] % LANES == 0:
        biases = [] if bias is None else [bias.detach()]
        return NativeLinear(executor, executor.pack([weight], biases, quantize))
    if can_pack(weight.device, weight.dtype):
        return MkldnnLinear(weight, bias)
    return None


@runtime_checkable
class LinearOps(Protocol):
    """Operators that make linear layers themselves."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A layer of weight [out, in] and bias [out]."""


@runtime_checkable
class QuantizedOps(Protocol):
    """Operators that make layers of weights quantised to integers."""

    def quantized_linear(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device
    ) -> Linear:
        """A layer that computes in the dtype of its rows."""


def four_bits(reader: WeightReader, weights: tuple[str, ...]) -> QuantizedWeight | None:
    """The named matrices, stacked, if they are stored in 4 bits and in groups that the native
    kernels compute with; else None."""
    found = reader.quantized(weights)
    if found is None or found.bits != 4 or found.groups is not None:
        return None
    inputs, count = found.shape[1], found.scales.shape[1]
    whole = inputs % count == 0 and inputs // count % GROUP == 0
    return found if count == 1 or whole else None


def quantizes(ops: Ops, dtype: torch.dtype, quantization: str, eight: bool) -> bool:
    """Whether a decoder's linear layers are rounded to 8 bits when they are loaded, given the
    engine's setting. `eight` says whether 8 bits are wanted or represent the stored weights; only
    native layers use that without being asked to. Raises ConfigError if `ops` cannot do it."""
    native = computes_natively(ops, dtype)
    if quantization == "int8" and not (native or isinstance(ops, QuantizedOps)):
        raise ConfigError(NO_INT8)
    return eight if native else quantization == "int8"


@runtime_checkable
class Float8Ops(Protocol):
    """Operators that make layers of 8-bit float weights."""

    def float8_linear(
        self, weight: Float8Weight, bias: torch.Tensor | None, device: torch.device
    ) -> Linear | None:
        """A layer; None if no kernel supports such a weight."""


class LinearMaker:
    """Lays weights out for `ops`. `quantize` rounds unquantised weights to 8 bits, which needs
    native layers or those of QuantizedOps."""

    def __init__(self, reader: WeightReader, ops: Ops, quantize: bool) -> None:
        self._reader, self._quantize = reader, quantize
        self._executor = ops.executor if isinstance(ops, NativeOps) else None
        self._quantized_ops = ops if isinstance(ops, QuantizedOps) else None
        self._make_float8 = ops.float8_linear if isinstance(ops, Float8Ops) else make_float8
        self._make_whole = ops.linear if isinstance(ops, LinearOps) else make_linear

    def make(
        self, weights: tuple[str, ...], biases: tuple[str, ...] = (), exact: bool = False
    ) -> Linear:
        """Makes one layer of the named matrices, stacked; an `exact` one is not rounded."""
        executor = self._executor
        if executor is not None and self._is_native(weights):
            quantize, own = self._quantize and not exact, [self._reader.read(one) for one in biases]
            blocks = None if quantize else self._reader.blocks(weights, KINDS)
            if blocks is not None:
                packed = executor.pack_blocks(blocks, own, False, self._reader.dtype)
                return NativeLinear(executor, packed)
            few = four_bits(self._reader, weights) if quantize else None
            if few is not None:
                return NativeLinear(executor, executor.pack_quantized(few, own, False))
            views = [self._reader.view(name) for name in weights]
            return NativeLinear(executor, executor.pack(views, own, quantize))
        bias = self._reader.stack(biases) if biases else None
        quantized = self._reader.quantized(weights)
        if quantized is not None:
            return self._quantized(quantized, bias)
        found = self._float8(weights, bias)
        if found is not None:
            return found
        whole = self._reader.stack(weights)
        if self._quantized_ops is not None and self._quantize and not exact:
            return self._quantized(round_weight(whole), bias)
        return self._make_whole(whole, bias)

    def stacked(self, name: str, count: int) -> list[Linear]:
        """Makes the layers of one tensor [count, out, in]."""
        executor, device = self._executor, self._reader.device
        if executor is not None:
            few = four_bits(self._reader, (name,)) if self._quantize else None
            if few is not None:
                packed = [executor.pack_quantized(one, [], False) for one in _split(few, count)]
                return [NativeLinear(executor, one) for one in packed]
        else:
            integers = self._reader.quantized((name,))
            if integers is not None:
                return [self._quantized(one, None) for one in _split(integers, count)]
            floats = self._reader.float8((name,)) if supports_float8(device) else None
            if floats is not None:
                made = [self._make_float8(one, None, device) for one in _split(floats, count)]
                found = [one for one in made if one is not None]
                if len(found) == count:
                    return found
        return [self._of(weight) for weight in self._reader.read(name)]

    def _of(self, weight: torch.Tensor) -> Linear:
        """Makes a layer of a float weight [out, in]."""
        packed = pack_linear(weight, None, self._executor, self._quantize)
        if packed is not None:
            return packed
        if self._quantized_ops is not None and self._quantize:
            return self._quantized(round_weight(weight), None)
        return make_linear(weight)

    def experts(self, experts: Sequence[tuple[Names, Names]]) -> ExpertWeights | None:
        """Stacks a mixture's matrices, given each expert's names of (gate and up, down); None if no
        grouped product supports them."""
        if self._executor is not None:
            return None
        found = None
        if self._quantized_ops is not None:
            found = read_packed_weights(self._reader, experts, self._quantize)
        return found or read_experts(self._reader, experts, supports_float8(self._reader.device))

    def stacked_experts(self, gate_up: str, down: str) -> ExpertWeights | None:
        """Like `experts`, of tensors that have the float matrices of all experts."""
        if self._executor is not None or self._quantize:
            return None
        upper, lower = (GroupedWeight(self._reader.read(name)) for name in (gate_up, down))
        return ExpertWeights(upper, lower)

    def _quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> Linear:
        if self._quantized_ops is not None:
            return self._quantized_ops.quantized_linear(weight, bias, self._reader.device)
        return QuantizedLinear(weight, bias, self._reader.dtype, self._reader.device)

    def _float8(self, weights: tuple[str, ...], bias: torch.Tensor | None) -> Linear | None:
        device = self._reader.device
        found = self._reader.float8(weights) if supports_float8(device) else None
        return None if found is None else self._make_float8(found, bias, device)

    def _is_native(self, weights: tuple[str, ...]) -> bool:
        inputs = [self._reader.shape(name)[1] for name in weights]
        return self._reader.dtype in DTYPES and not any(count % LANES for count in inputs)


def _split(stacked: Part, count: int) -> list[Part]:
    """The matrices of `count` experts, whose outputs follow each other."""
    rows = stacked.shape[0] // count
    return [stacked.rows(at * rows, (at + 1) * rows) for at in range(count)]
