"""Which tensors of an adapter's file make up which of our matrices, and how they are read.

Experts of a mixture come one by one (`experts.3.up_proj`), as PEFT saves them where a model has
them so, or together (`experts`, with `target_parameters`), where it has them as one parameter.
"""

import re
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from .shapes import LinearName

# A tensor of a file, by its name.
Read = Callable[[str], torch.Tensor]

_MODULE = re.compile(r"(?:model|language_model\.model|model\.language_model)\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
# Two parameters of one module are wrapped one in the other; which is which their shapes tell.
_JOINED = re.compile(r"mlp\.experts(?:\.base_layer)?")
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True, slots=True)
class Factors:
    """`down` is A [rank, in], `up` is B transposed [rank, out] with the scale in it; of a whole
    module, wherever its model is divided. Those of experts are stacked: [experts, rank, ...]."""

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class ModulePath:
    """A module's place in a model. `expert` -1: it is none of a mixture's, or all of them; `name`
    is the module's in its layer, or an expert's in itself."""

    layer: int
    name: str
    expert: int = -1

    @property
    def written(self) -> str:
        """Its name in its layer."""
        return self.name if self.expert < 0 else f"mlp.experts.{self.expert}.{self.name}"

    @property
    def is_of_all_experts(self) -> bool:
        return self.expert < 0 and _JOINED.fullmatch(self.name) is not None


def parse(path: str) -> ModulePath | None:
    """None for what is no module of a decoder layer."""
    found = _MODULE.fullmatch(path)
    if found is None:
        return None
    layer, name = int(found[1]), found[2].replace("block_sparse_moe.gate", "mlp.gate")
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return ModulePath(layer, name)
    return ModulePath(layer, _MIXTRAL.get(expert[2], expert[2]), int(expert[1]))


@dataclass(frozen=True, slots=True)
class Pair:
    """Where A and B are in a file, their rank, and the number that multiplies their product."""

    down: str
    up: str
    rank: int
    scale: float

    def read(self, read: Read) -> tuple[torch.Tensor, torch.Tensor]:
        """A, and B in float32 with the scale in it, as they are stored."""
        return read(self.down), read(self.up).float() * self.scale


@dataclass(frozen=True, slots=True)
class Plain:
    layer: int
    linear: LinearName
    name: str
    pair: Pair

    def load(self, read: Read, dtype: torch.dtype) -> Factors:
        down, up = self.pair.read(read)
        return Factors(down.to(dtype, copy=True), up.T.contiguous().to(dtype))


@dataclass(frozen=True, slots=True)
class Joined:
    """Of all `experts`: A [experts * rank, in], B [out, rank * experts], each expert's columns as
    far from each other as there are experts. If `turned` they are of the transposed matrix, as
    PEFT before 0.19 has them: A is what B should be, and B what A should be."""

    layer: int
    linear: LinearName
    name: str
    pair: Pair
    experts: int
    turned: bool

    def load(self, read: Read, dtype: torch.dtype) -> Factors:
        a, b = self.pair.read(read)
        a = a.view(self.experts, self.pair.rank, -1)
        b = b.view(len(b), self.pair.rank, self.experts).permute(2, 1, 0)
        down, up = (b, a) if self.turned else (a, b)
        return Factors(down.contiguous().to(dtype, copy=True), up.contiguous().to(dtype, copy=True))


@dataclass(frozen=True, slots=True)
class Stacked:
    """Of experts one by one; `pairs` are (expert, which of the matrices that lie side by side in
    the outputs, pair). Each of those has ranks of its own, up to `ranks`."""

    layer: int
    linear: LinearName
    name: str
    pairs: Rows[tuple[int, int, Pair]]
    ranks: Rows[int]
    experts: int
    inputs: int
    outputs: int

    def load(self, read: Read, dtype: torch.dtype) -> Factors:
        rank = sum(self.ranks)
        down = torch.zeros(self.experts, rank, self.inputs, dtype=dtype)
        up = torch.zeros(self.experts, rank, self.outputs, dtype=dtype)
        width = self.outputs // len(self.ranks)
        for expert, part, pair in self.pairs:
            begin = sum(self.ranks[:part])
            own, columns = slice(begin, begin + pair.rank), slice(part * width, (part + 1) * width)
            a, b = pair.read(read)
            down[expert, own].copy_(a)
            up[expert, own, columns].copy_(b.T)
        return Factors(down, up)


Module = Plain | Joined | Stacked
