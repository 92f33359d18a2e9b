"""Linear layers in the native kernels' layout, and the experts of a mixture made of such layers."""

import ctypes
from collections.abc import Sequence
from functools import partial

import torch

from ...checkpoints.config import ExpertsConfig
from ...kernels.cpu import structs
from ...kernels.cpu.executor import Executor, PackedLinear
from ...layers.feed_forward import GatedActivation, GatedMLP, clamped_swiglu
from ...operators.base import gelu_tanh_mul, squared_relu
from ...operators.cpu import NativeOps


class NativeLinear:
    """A layer in the native kernels' layout. Not thread-safe, like its executor."""

    def __init__(self, executor: Executor, layer: PackedLinear) -> None:
        self._executor, self._layer = executor, layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self._layer.outputs)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        product = self._executor.linear(self._layer, rows, x.dtype)
        return product.reshape(*x.shape[:-1], -1)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [N, out] of dense rows [N, in], as a whole step's logits are."""
        return self._executor.linear(self._layer, rows)

    def join(self, experts: Sequence[GatedMLP], config: ExpertsConfig) -> "NativeExperts | None":
        """The experts in one call; None if the kernels do not support them."""
        gate_up = _packed([expert.gate_up for expert in experts])
        down = _packed([expert.down for expert in experts])
        activation = _activation_of(experts)
        if gate_up is None or down is None or activation is None:
            return None
        gates = 1 if activation.kind == structs.SQUARED_RELU else 2
        assert gate_up[0].outputs == gates * down[0].inputs, "experts have one inner size"
        return NativeExperts(self._executor, gate_up, down, activation, config)


class NativeExperts:
    """The experts of a mixture in one call of the native kernels: layers of one shape. Not
    thread-safe, like its executor."""

    def __init__(
        self,
        executor: Executor,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        activation: structs.Activation,
        config: ExpertsConfig,
    ) -> None:
        self._executor = executor
        # What the structures point to.
        self._kept = gate_up, down, _described(gate_up), _described(down)
        self._described = structs.Experts(
            gate_up=ctypes.addressof(self._kept[2]),
            down=ctypes.addressof(self._kept[3]),
            count=len(gate_up),
            per_token=config.per_token,
            hidden=gate_up[0].inputs,
            inner=down[0].inputs,
            scaled_inputs=config.scaled_inputs,
            activation=activation,
        )

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        rows, dense = x.contiguous(), weights.contiguous()
        return self._executor.experts(self._described, rows, chosen.contiguous(), dense)


def _packed(linears: Sequence[object]) -> list[PackedLinear] | None:
    """The packed weights of layers that have one shape and storage; None if they do not."""
    layers = [linear._layer for linear in linears if isinstance(linear, NativeLinear)]
    same = len({_shape(layer) for layer in layers}) == 1 and len(layers) == len(linears)
    return layers if same else None


def _shape(layer: PackedLinear) -> tuple[object, ...]:
    quantised = layer.scales is not None, layer.zeros is not None, layer.group, bool(layer.panels)
    return layer.inputs, layer.outputs, layer.weight.dtype, *quantised


def _described(layers: Sequence[PackedLinear]) -> ctypes.Array[structs.Linear]:
    return (structs.Linear * len(layers))(*[layer.describe() for layer in layers])


def _activation_of(experts: Sequence[GatedMLP]) -> structs.Activation | None:
    """The kernels' activation of experts; None if they have no such one."""
    first = experts[0].activation
    same = all(expert.activation == first for expert in experts)
    return _activation(first) if same else None


def _activation(of: GatedActivation) -> structs.Activation | None:
    if isinstance(getattr(of, "__self__", None), NativeOps) and of.__name__ == "silu_mul":
        return structs.Activation(structs.SILU)
    if of is gelu_tanh_mul:
        return structs.Activation(structs.GELU_TANH)
    if of is squared_relu:
        return structs.Activation(structs.SQUARED_RELU)
    if isinstance(of, partial) and of.func is clamped_swiglu:
        (swiglu,) = of.args
        return structs.Activation(structs.CLAMPED_SWIGLU, swiglu.alpha, swiglu.limit)
    return None
