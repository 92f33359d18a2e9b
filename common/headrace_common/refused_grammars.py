"""The memory of grammars that were too expensive to compile: refused at once for a while."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .limited_pool import Excess

TTL_S = 3600.0
MOST = 4096
# Excesses that may come from a machine which is busy, and not from the grammar, count as one
# attempt each.
ATTEMPTS = 3
_DOUBTFUL = frozenset({Excess.TIMEOUT, Excess.DIED})


@dataclass(frozen=True, slots=True)
class RefusedGrammar:
    """`attempts` is how often it was tried, wherever that was."""

    excess: Excess
    attempts: int

    @property
    def final(self) -> bool:
        """Whether it is not tried again."""
        return self.excess not in _DOUBTFUL or self.attempts >= ATTEMPTS


class RefusedGrammars(Protocol):
    """By digest of the grammar: what was refused is the same for every tenant."""

    async def find(self, digest: str) -> RefusedGrammar | None: ...

    async def add(self, digest: str, refused: RefusedGrammar) -> None:
        """Kept for TTL_S."""


class LocalRefusedGrammars:
    """The memory of this process alone: the MOST grammars that were refused last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, tuple[RefusedGrammar, float]] = OrderedDict()

    async def find(self, digest: str) -> RefusedGrammar | None:
        refused, until = self._kept.get(digest, (None, 0.0))
        return refused if self._clock() < until else None

    async def add(self, digest: str, refused: RefusedGrammar) -> None:
        self._kept[digest] = refused, self._clock() + TTL_S
        self._kept.move_to_end(digest)
        while len(self._kept) > MOST:
            self._kept.popitem(last=False)
