"""The linear layers of a hybrid decoder that adapters may change."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, Protocol

import torch

from ...checkpoints.tensor_files import Shape
from ...layers.layers import Linear
from ...lora.batch import LoRABatch
from ...lora.modules import parse
from ...lora.shapes import (
    EXPERTS_DOWN,
    EXPERTS_GATE_UP,
    Columns,
    LayerShapes,
    LinearName,
    LinearShape,
    LocalPart,
    ModuleName,
    merge_parts,
)

ExpertLinear = Literal["experts_gate_up", "experts_down"]


class LocalParts(Protocol):
    """Knows which parts of tensors are in this process."""

    @property
    def own_experts(self) -> range | None:
        """The experts in this process; None: a part of each."""

    def local(self, name: str, whole: Shape, dimension: int) -> LocalPart: ...


class AdaptedLayers:
    """Makes linear layers add the adapters of a step's rows to their products.

    `shapes` has one entry for each of the decoder's layers: what `expect` was told, or this rank's
    part of it. `batch` has the adapters of the step that is being computed; None: no row has one.
    Unless `enabled`, layers stay as they are.
    """

    def __init__(self, layers: int, cuts: LocalParts | None = None, enabled: bool = True) -> None:
        self._shapes: tuple[dict[LinearName, LinearShape], ...] = tuple({} for _ in range(layers))
        self._cuts, self._enabled = cuts, enabled
        self.batch: LoRABatch | None = None

    @property
    def shapes(self) -> tuple[LayerShapes, ...]:
        return self._shapes

    def expect(self, matrices: Mapping[str, int], inputs: int) -> None:
        """Notes a layer of these modules, stacked (name -> number of outputs)."""
        place = parse(next(iter(matrices)))
        if place is not None:
            locals_ = {name: self._outputs(name, out, inputs) for name, out in matrices.items()}
            named = {_name(module): local for module, local in locals_.items()}
            shape = self._shape(named, self._inputs(*next(iter(matrices.items())), inputs))
            self._shapes[place.layer][ModuleName(place.name)] = shape

    def expect_experts(
        self, linear: ExpertLinear, tensors: Mapping[str, Shape], matrices: int, experts: int
    ) -> None:
        """Notes the `matrices` of each of `experts` that are side by side: the names of their
        modules, or of the first expert's, and the shapes, which end with outputs and inputs."""
        (name, whole), *_ = tensors.items()
        place = parse(name)
        if place is None:
            return
        outputs = [self._local(one, shape, len(shape) - 2) for one, shape in tensors.items()]
        merged = {
            EXPERTS_DOWN if linear == "experts_down" else EXPERTS_GATE_UP: merge_parts(outputs)
        }
        own = None if self._cuts is None else self._cuts.own_experts
        self._shapes[place.layer][linear] = replace(
            self._shape(merged, self._local(name, whole, len(whole) - 1)),
            experts=experts,
            local_experts=range(experts) if own is None else own,
            matrices=matrices,
        )

    def adapt(self, names: Iterable[str], linear: Linear) -> Linear:
        """The layer of these modules with adapters. Layers that are not one of the decoder's, or
        take no adapters, are returned as they are."""
        place = parse(next(iter(names))) if self._enabled else None
        if place is None:
            return linear
        return AdaptedLinear(linear, self, place.layer, ModuleName(place.name))

    def _outputs(self, name: str, outputs: int, inputs: int) -> LocalPart:
        return self._local(name, (outputs, inputs), 0)

    def _inputs(self, name: str, outputs: int, inputs: int) -> LocalPart:
        return self._local(name, (outputs, inputs), 1)

    def _local(self, name: str, whole: Shape, dimension: int) -> LocalPart:
        if self._cuts is None:
            return LocalPart(whole[dimension], ((0, whole[dimension]),))
        return self._cuts.local(f"{name}.weight", whole, dimension)

    def _shape(self, modules: Mapping[str, LocalPart], inputs: LocalPart) -> LinearShape:
        parts: dict[str, Columns] = {}
        outputs = 0
        for name, local in modules.items():
            parts[name] = Columns(outputs, local.width, local)
            outputs += local.width
        return LinearShape(inputs.width, outputs, parts, inputs)


def _name(module: str) -> str:
    place = parse(module)
    assert place is not None, "the modules of one layer are all in a decoder layer"
    return place.name


class AdaptedLinear:
    """A linear layer of decoder layer `layer`, with the adapters of the step's rows."""

    def __init__(
        self, linear: Linear, adapters: AdaptedLayers, layer: int, name: ModuleName
    ) -> None:
        self.linear = linear
        self._adapters, self._layer, self._name = adapters, layer, name

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = self.linear(x)
        batch = self._adapters.batch
        if batch is not None:
            batch.of_tokens(self._layer).add(self._name, x, product)
        return product
