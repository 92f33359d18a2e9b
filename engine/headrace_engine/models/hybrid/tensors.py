"""Sources of a hybrid decoder's tensors: a family asks one source for the names and shapes, and
another one for the weights."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from ...checkpoints.config import ExpertsConfig
from ...checkpoints.tensor_files import Shape
from ...layers.expert_weights import ExpertWeights, Names
from ...layers.layers import Linear, PlainLinear
from ...operators.base import Ops
from ..linear.linear_maker import LinearMaker
from ..weights.weights import WeightReader
from .adapters import AdaptedLayers, ExpertLinear

# The name of the experts' last matrix, if they are one tensor.
DOWN = "down_proj"


class Tensors(Protocol):
    """The tensors of a checkpoint, by their names there."""

    def tensor(self, name: str, *shape: int) -> torch.Tensor: ...

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that no file has, in the decoder's dtype, where the others are."""

    def float32(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor that is too coarse in the decoder's dtype."""

    def linear(
        self, matrices: Mapping[str, int], inputs: int, bias: bool = False, exact: bool = False
    ) -> Linear:
        """One layer of the named modules, stacked: name -> number of outputs. With `exact` its
        weights are not rounded when they are loaded."""

    def stacked(
        self, name: str, experts: ExpertsConfig, widths: tuple[int, ...], inputs: int
    ) -> list[Linear]:
        """The layers of this process's experts, in one tensor [experts, outputs, inputs]. Each
        consists of matrices of these widths: a gate and what it gates, or what follows."""

    def experts(
        self,
        prefix: str,
        experts: ExpertsConfig,
        stacked: str,
        matrices: Mapping[str, int],
        inputs: int,
    ) -> list[Linear]:
        """For each of this process's experts one layer of the named matrices. They are stored one
        by one, below `prefix` and the expert's number, or all as the tensor `stacked` below
        `prefix`."""

    def grouped(
        self,
        prefix: str,
        experts: ExpertsConfig,
        stacked: tuple[str, str],
        matrices: tuple[Names, Names],
    ) -> ExpertWeights | None:
        """The matrices of these experts together, given the names of (gate and up, down), stored
        like those of `experts`; None if they cannot be stacked, and have to be read one by one."""


class ExpectedTensors:
    """Collects names and shapes; its tensors have no memory. `stored` has the names of the
    checkpoint's tensors. `adapters` are told of the layers."""

    def __init__(
        self,
        dtype: torch.dtype,
        stored: Collection[str] = (),
        adapters: AdaptedLayers | None = None,
    ) -> None:
        self.shapes: dict[str, Shape] = {}
        self._adapters = adapters
        self._dtype, self._stored = dtype, stored
        self._linear = PlainLinear(torch.empty(0), None)  # stands for every layer

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        self.shapes[name] = shape
        return torch.empty(shape, dtype=self._dtype, device="meta")

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype)

    def float32(self, name: str, *shape: int) -> torch.Tensor:
        return self.tensor(name, *shape)

    def linear(
        self, matrices: Mapping[str, int], inputs: int, bias: bool = False, exact: bool = False
    ) -> Linear:
        if self._adapters is not None:
            self._adapters.expect(matrices, inputs)
        return self._expect(matrices, inputs, bias)

    def _expect(self, matrices: Mapping[str, int], inputs: int, bias: bool = False) -> Linear:
        for name, outputs in matrices.items():
            self.shapes[f"{name}.weight"] = (outputs, inputs)
        for name, outputs in matrices.items() if bias else ():
            self.shapes[f"{name}.bias"] = (outputs,)
        return self._linear

    def stacked(
        self, name: str, experts: ExpertsConfig, widths: tuple[int, ...], inputs: int
    ) -> list[Linear]:
        shape, module = (experts.count, sum(widths), inputs), name.removesuffix(".weight")
        if self._adapters is not None:
            linear: ExpertLinear = "experts_gate_up" if len(widths) > 1 else "experts_down"
            self._adapters.expect_experts(linear, {module: shape}, len(widths), experts.count)
        return self._stacked(name, shape)

    def _stacked(self, name: str, shape: tuple[int, int, int]) -> list[Linear]:
        self.shapes[name] = shape
        return [self._linear] * shape[0]

    def experts(
        self,
        prefix: str,
        experts: ExpertsConfig,
        stacked: str,
        matrices: Mapping[str, int],
        inputs: int,
    ) -> list[Linear]:
        if self._adapters is not None:
            linear: ExpertLinear = "experts_down" if stacked == DOWN else "experts_gate_up"
            first = _numbered(prefix, 0, matrices)
            shapes = {name: (outputs, inputs) for name, outputs in first.items()}
            self._adapters.expect_experts(linear, shapes, len(matrices), experts.count)
        if prefix + stacked in self._stored:
            whole = (experts.count, sum(matrices.values()), inputs)
            return self._stacked(prefix + stacked, whole)
        every = range(experts.count)
        return [self._expect(_numbered(prefix, at, matrices), inputs) for at in every]

    def grouped(
        self,
        prefix: str,
        experts: ExpertsConfig,
        stacked: tuple[str, str],
        matrices: tuple[Names, Names],
    ) -> ExpertWeights | None:
        return None


class StoredTensors:
    """Reads weights, in the order in which they were expected. `adapters` change the layers
    that take some; `quantize`: as in LinearMaker."""

    def __init__(
        self, reader: WeightReader, ops: Ops, adapters: AdaptedLayers, quantize: bool
    ) -> None:
        self._reader, self._linears = reader, LinearMaker(reader, ops, quantize)
        self._adapters = adapters

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._reader.read(name)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype=self._reader.dtype, device=self._reader.device)

    def float32(self, name: str, *shape: int) -> torch.Tensor:
        return self._reader.read_float32(name)

    def linear(
        self, matrices: Mapping[str, int], inputs: int, bias: bool = False, exact: bool = False
    ) -> Linear:
        biases = _names(list(matrices), "bias") if bias else ()
        made = self._linears.make(_names(list(matrices), "weight"), biases, exact)
        return self._adapters.adapt(matrices, made)

    def stacked(
        self, name: str, experts: ExpertsConfig, widths: tuple[int, ...], inputs: int
    ) -> list[Linear]:
        return self._linears.stacked(name, len(experts.local))

    def experts(
        self,
        prefix: str,
        experts: ExpertsConfig,
        stacked: str,
        matrices: Mapping[str, int],
        inputs: int,
    ) -> list[Linear]:
        if self._reader.expects(prefix + stacked):
            return self.stacked(prefix + stacked, experts, tuple(matrices.values()), inputs)
        every = [list(_numbered(prefix, at, matrices)) for at in experts.local]
        return [self._linears.make(_names(names, "weight")) for names in every]

    def grouped(
        self,
        prefix: str,
        experts: ExpertsConfig,
        stacked: tuple[str, str],
        matrices: tuple[Names, Names],
    ) -> ExpertWeights | None:
        if self._reader.expects(prefix + stacked[0]):
            return self._linears.stacked_experts(*(prefix + name for name in stacked))
        return self._linears.experts(
            [
                (_weights(f"{prefix}{at}.", matrices[0]), _weights(f"{prefix}{at}.", matrices[1]))
                for at in experts.local
            ]
        )


def _weights(prefix: str, names: Names) -> Names:
    return tuple(f"{prefix}{name}.weight" for name in names)


def _numbered(prefix: str, expert: int, matrices: Mapping[str, int]) -> dict[str, int]:
    return {f"{prefix}{expert}.{name}": outputs for name, outputs in matrices.items()}


def _names(modules: Sequence[str], kind: str) -> tuple[str, ...]:
    return tuple(f"{module}.{kind}" for module in modules)
