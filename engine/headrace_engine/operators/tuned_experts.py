"""The launches of mixtures of experts, by their shape and a step's tokens: measured by `autotune`,
or the table's."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..kernels.triton.launch import EXPERT_BOUNDS, ExpertLaunch

# Launches by index in EXPERT_BOUNDS; the last one is for more tokens. None: the table's.
Choices = list[ExpertLaunch | None]


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """`stored` is the dtype of weights, with scales for `group` inputs; `group` 0: one scale for
    all inputs, or none. `bits` is the width of weights that share an element; 0: each has its own.
    `elsewhere` of the experts are in other processes.
    """

    experts: int
    per_token: int
    hidden: int
    inner: int
    stored: torch.dtype
    group: int = 0
    bits: int = 0
    elsewhere: int = 0

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.inner * (self.bits or 8 * self.stored.itemsize) // 8

    def read_bytes(self, tokens: int) -> int:
        """Bytes of the experts that at least one token chooses, if all are chosen equally often."""
        left_out: float = (1 - self.per_token / self.experts) ** tokens
        return round((self.experts - self.elsewhere) * (1 - left_out) * self.expert_bytes)


class TunableMixture(Protocol):
    """A mixture that can be computed with any of several launches."""

    def candidates(self, x: torch.Tensor) -> list[ExpertLaunch]:
        """Launches for this number of rows; the first is the table's."""

    def run(
        self, rows: torch.Tensor, launch: ExpertLaunch, slots: torch.Tensor | None = None
    ) -> torch.Tensor: ...


def _none() -> Choices:
    return [None] * (len(EXPERT_BOUNDS) + 1)


@dataclass(slots=True)
class TunedMixture:
    """All mixtures of one shape and their measured launches."""

    layers: list[TunableMixture] = field(default_factory=list)
    choices: Choices = field(default_factory=_none)

    def chosen(self, tokens: int) -> ExpertLaunch | None:
        return self.choices[bisect_left(EXPERT_BOUNDS, tokens)]


class Mixtures:
    """The mixtures that one set of operators has made."""

    def __init__(self) -> None:
        self.shapes: dict[MixtureShape, TunedMixture] = {}

    def add(self, shape: MixtureShape, mixture: TunableMixture) -> TunedMixture:
        tuned = self.shapes.setdefault(shape, TunedMixture())
        tuned.layers.append(mixture)
        return tuned
