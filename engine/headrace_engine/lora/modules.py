"""The modules of an adapter as its file stores them, and how they are read as our matrices.

PEFT saves experts of a mixture one by one (`experts.3.up_proj`) or, if they are one parameter of
the model, as one module (`experts`, with `target_parameters`).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .shapes import LinearName

# A function that reads a tensor of a file by its name.
Read = Callable[[str], torch.Tensor]

_MODULE = re.compile(
    r"(?:model|backbone|language_model\.model|model\.language_model)\.layers\.(\d+)\.(.+)"
)
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)")
# For two parameters of one module PEFT nests two wrappers. The shapes distinguish them, and the two
# modules of Granite.
_FUSED_EXPERTS = re.compile(r"mlp\.(?:experts(?:\.base_layer)?|input_linear|output_linear)")
# Llama's names for modules that checkpoints name otherwise.
_RENAMED = {
    "block_sparse_moe.": "mlp.",
    "mixer.experts": "mlp.experts",
    "mlp.gate.wg": "mlp.gate",
    "mlp.shared_experts.": "mlp.shared_expert.",
    "mlp.shared_mlp.": "mlp.shared_expert.",
    "feed_forward.router": "mlp.gate",
    "feed_forward.": "mlp.",
    "self_attn.forget_gate.": "self_attn.",
}
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True, slots=True)
class Factors:
    """`down` is A [rank, in], `up` is B transposed [rank, out] and scaled; of whole modules, not of
    one rank's part. Those of experts are stacked: [experts, rank, ...]."""

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class ModulePath:
    """A module's place in a model. `expert` -1: all experts, or no expert; `name` is the module's
    name in its layer, or in its expert."""

    layer: int
    name: str
    expert: int = -1

    @property
    def written(self) -> str:
        """Its name in its layer."""
        return self.name if self.expert < 0 else f"mlp.experts.{self.expert}.{self.name}"

    @property
    def is_fused_experts(self) -> bool:
        return self.expert < 0 and _FUSED_EXPERTS.fullmatch(self.name) is not None


def parse(path: str) -> ModulePath | None:
    """The place of a module; None if it is not a module of a decoder layer."""
    found = _MODULE.fullmatch(path)
    if found is None:
        return None
    layer, name = int(found[1]), found[2]
    for stored, usual in _RENAMED.items():
        name = name.replace(stored, usual)
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return ModulePath(layer, name)
    return ModulePath(layer, _MIXTRAL.get(expert[2], expert[2]), int(expert[1]))


@dataclass(frozen=True, slots=True)
class LoRAPair:
    """The names of A and B in a file, their rank, and the factor of their product."""

    down: str
    up: str
    rank: int
    scale: float

    def read(self, read: Read) -> tuple[torch.Tensor, torch.Tensor]:
        """A, and B in float32 times the scale, in the stored layout."""
        return read(self.down), read(self.up).float() * self.scale


@dataclass(frozen=True, slots=True)
class LinearModule:
    """A linear layer of the model, with one A and one B."""

    layer: int
    linear: LinearName
    name: str
    pair: LoRAPair

    def load(self, read: Read, dtype: torch.dtype) -> Factors:
        down, up = self.pair.read(read)
        return Factors(down.to(dtype, copy=True), up.T.contiguous().to(dtype))


@dataclass(frozen=True, slots=True)
class FusedExpertsModule:
    """Modules of all `experts`: A [experts * rank, in], B [out, rank * experts], in which an
    expert's columns are `experts` apart. `transposed`: A and B are of the transposed matrix, as in
    PEFT before 0.19, so they are exchanged."""

    layer: int
    linear: LinearName
    name: str
    pair: LoRAPair
    experts: int
    transposed: bool

    def load(self, read: Read, dtype: torch.dtype) -> Factors:
        a, b = self.pair.read(read)
        a = a.view(self.experts, self.pair.rank, -1)
        b = b.view(len(b), self.pair.rank, self.experts).permute(2, 1, 0)
        down, up = (b, a) if self.transposed else (a, b)
        return Factors(down.contiguous().to(dtype, copy=True), up.contiguous().to(dtype, copy=True))


@dataclass(frozen=True, slots=True)
class PerExpertModules:
    """Modules of single experts; `pairs` are (expert, index of the matrix among those side by side
    in the outputs, pair). Each of those matrices has its own rank, at most that in `ranks`."""

    layer: int
    linear: LinearName
    name: str
    pairs: Sequence[tuple[int, int, LoRAPair]]
    ranks: Sequence[int]
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


Module = LinearModule | FusedExpertsModule | PerExpertModules
