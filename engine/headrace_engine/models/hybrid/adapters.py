"""The linear layers of a hybrid decoder that adapters may change."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import torch

from ...layers.layers import Linear
from ...lora.batch import LoRABatch
from ...lora.modules import ModulePath, parse
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

# Mamba's products between its convolution and its scan, which may be computed for one sequence
# after the other, so that their rows are not those of the step.
_LEFT_OUT = (".x_proj", ".dt_proj")


class LocalParts(Protocol):
    """Knows which parts of tensors are in this process."""

    @property
    def own_experts(self) -> range | None:
        """The experts in this process; None: a part of each."""

    def local(self, name: str, whole: tuple[int, ...], dimension: int) -> LocalPart: ...


class AdaptedLayers:
    """Makes linear layers add the adapters of a step's rows to their products.

    `shapes` has one entry for each of the decoder's layers: what `expect` was told, or this rank's
    part of it. `batch` has the adapters of the step that is being computed; None: no row has one.
    """

    def __init__(self, layers: int, cuts: LocalParts | None = None) -> None:
        self._shapes: tuple[dict[LinearName, LinearShape], ...] = tuple({} for _ in range(layers))
        self._cuts = cuts
        self.batch: LoRABatch | None = None

    @property
    def shapes(self) -> tuple[LayerShapes, ...]:
        return self._shapes

    def expect(self, matrices: Mapping[str, int], inputs: int) -> None:
        """Notes a layer of these modules, stacked (name -> number of outputs)."""
        place = _place(next(iter(matrices)))
        if place is not None:
            locals_ = {name: self._outputs(name, out, inputs) for name, out in matrices.items()}
            named = {_name(module): local for module, local in locals_.items()}
            shape = self._shape(named, self._inputs(*next(iter(matrices.items())), inputs))
            self._shapes[place.layer][ModuleName(place.name)] = shape

    def expect_experts(
        self, prefix: str, count: int, matrices: Mapping[str, int], inputs: int
    ) -> None:
        """Notes the matrices of all experts of a mixture: first gates and ups, then downs. Other
        experts take no adapters."""
        names = {f"{prefix}0.{name}": width for name, width in matrices.items()}
        place = parse(next(iter(names)))
        if place is None:
            return
        own, joint = self._shapes[place.layer], len(matrices) > 1
        if not joint and "experts_gate_up" not in own:
            return
        modules = [self._outputs(name, out, inputs) for name, out in names.items()]
        merged = {EXPERTS_GATE_UP if joint else EXPERTS_DOWN: merge_parts(modules)}
        shape = self._shape(merged, self._inputs(*next(iter(names.items())), inputs))
        linear: LinearName = "experts_gate_up" if joint else "experts_down"
        own_experts = None if self._cuts is None else self._cuts.own_experts
        local = range(count) if own_experts is None else own_experts
        own[linear] = replace(shape, experts=count, local_experts=local)

    def adapt(self, names: Iterable[str], linear: Linear) -> Linear:
        """The layer of these modules with adapters. Layers that are not one of the decoder's, or
        take no adapters, are returned as they are."""
        place = _place(next(iter(names)))
        if place is None:
            return linear
        return AdaptedLinear(linear, self, place.layer, ModuleName(place.name))

    def _outputs(self, name: str, outputs: int, inputs: int) -> LocalPart:
        return self._local(name, (outputs, inputs), 0)

    def _inputs(self, name: str, outputs: int, inputs: int) -> LocalPart:
        return self._local(name, (outputs, inputs), 1)

    def _local(self, name: str, whole: tuple[int, int], dimension: int) -> LocalPart:
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


def _place(name: str) -> ModulePath | None:
    """The place of a module that takes adapters; None if it does not."""
    found = parse(name)
    return None if found is None or found.name.endswith(_LEFT_OUT) else found


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
