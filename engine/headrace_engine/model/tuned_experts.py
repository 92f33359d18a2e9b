"""Which launches mixtures of experts use, by their shape and the tokens of a step: what was
measured to be the fastest, or the table's. What was measured comes from outside (`tuning`).
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..triton_kernels.launch import EXPERT_BOUNDS, ExpertLaunch

# Launches by the place of a number of tokens in EXPERT_BOUNDS, the last one for all above them;
# None: the table's.
Choices = list[ExpertLaunch | None]


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """`stored` is what weights are kept in, with scales for `group` inputs; 0: for all or none.
    Several of so many `bits` share an element; 0: each has its own."""

    experts: int
    per_token: int
    hidden: int
    inner: int
    stored: torch.dtype
    group: int = 0
    bits: int = 0

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.inner * (self.bits or 8 * self.stored.itemsize) // 8

    def read_bytes(self, tokens: int) -> int:
        """Of experts that somebody takes, where all are taken equally often."""
        left_out: float = (1 - self.per_token / self.experts) ** tokens
        return round(self.experts * (1 - left_out) * self.expert_bytes)


class TunableMixture(Protocol):
    def candidates(self, x: torch.Tensor) -> list[ExpertLaunch]:
        """For such rows; the first is the table's."""

    def run(
        self, rows: torch.Tensor, launch: ExpertLaunch, slots: torch.Tensor | None = None
    ) -> torch.Tensor: ...


def _none() -> Choices:
    return [None] * (len(EXPERT_BOUNDS) + 1)


@dataclass(slots=True)
class TunedMixture:
    """All layers of one shape."""

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
