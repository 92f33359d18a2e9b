"""Sources of a hybrid decoder's tensors: a family asks one source for the names and shapes, and
another one for the weights."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ...checkpoints.tensor_files import Shape
from ...layers.layers import Linear, PlainLinear, make_linear
from ...operators.base import Ops
from ..linear.linear_maker import LinearMaker
from ..weights.weights import WeightReader


class Tensors(Protocol):
    """The tensors of a checkpoint, by their names there."""

    def tensor(self, name: str, *shape: int) -> torch.Tensor: ...

    def linear(
        self, matrices: Mapping[str, int], inputs: int, bias: bool = False, exact: bool = False
    ) -> Linear:
        """One layer of the named modules, stacked: name -> number of outputs. With `exact` its
        weights are never quantised."""

    def stacked(self, name: str, count: int, outputs: int, inputs: int) -> list[Linear]:
        """The layers of one module whose weight is [count, outputs, inputs]."""


class ExpectedTensors:
    """Collects names and shapes; its tensors have no memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.shapes: dict[str, Shape] = {}
        self._dtype = dtype

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        self.shapes[name] = shape
        return torch.empty(shape, dtype=self._dtype, device="meta")

    def linear(
        self, matrices: Mapping[str, int], inputs: int, bias: bool = False, exact: bool = False
    ) -> Linear:
        for name, outputs in matrices.items():
            self.tensor(f"{name}.weight", outputs, inputs)
        for name, outputs in matrices.items() if bias else ():
            self.tensor(f"{name}.bias", outputs)
        return PlainLinear(torch.empty(0), None)

    def stacked(self, name: str, count: int, outputs: int, inputs: int) -> list[Linear]:
        self.tensor(f"{name}.weight", count, outputs, inputs)
        return [PlainLinear(torch.empty(0), None) for _ in range(count)]


class StoredTensors:
    """Reads weights, in the order in which they were expected."""

    def __init__(self, reader: WeightReader, ops: Ops) -> None:
        self._reader, self._linears = reader, LinearMaker(reader, ops, quantize=False)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._reader.read(name)

    def linear(
        self, matrices: Mapping[str, int], inputs: int, bias: bool = False, exact: bool = False
    ) -> Linear:
        biases = _names(list(matrices), "bias") if bias else ()
        return self._linears.make(_names(list(matrices), "weight"), biases, exact)

    def stacked(self, name: str, count: int, outputs: int, inputs: int) -> list[Linear]:
        return [make_linear(weight) for weight in self._reader.read(f"{name}.weight")]


def _names(modules: Sequence[str], kind: str) -> tuple[str, ...]:
    return tuple(f"{module}.{kind}" for module in modules)
