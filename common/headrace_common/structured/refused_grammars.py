"""Remembers grammars that were too expensive to compile, so that they are refused for a while."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..pools.limited_pool import KillReason

TTL_S = 3600.0
MAX_GRAMMARS = 4096
# A compilation that a busy machine may have ended is tried this many times in all.
MAX_ATTEMPTS = 3
_DOUBTFUL = frozenset({KillReason.TIMEOUT, KillReason.DIED})


@dataclass(frozen=True, slots=True)
class RefusedGrammar:
    """A refused grammar. `attempts` counts the compilations by all processes."""

    reason: KillReason
    attempts: int

    @property
    def final(self) -> bool:
        """Whether no process may try it again."""
        return self.reason not in _DOUBTFUL or self.attempts >= MAX_ATTEMPTS


class RefusedGrammars(Protocol):
    """Refused grammars by digest, the same for all tenants."""

    async def find(self, digest: str) -> RefusedGrammar | None: ...

    async def add(self, digest: str, refused: RefusedGrammar) -> None:
        """Remembers a refused grammar for TTL_S."""


class LocalRefusedGrammars:
    """The `MAX_GRAMMARS` grammars that this process refused last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, tuple[RefusedGrammar, float]] = OrderedDict()

    async def find(self, digest: str) -> RefusedGrammar | None:
        refused, until = self._kept.get(digest, (None, 0.0))
        return refused if self._clock() < until else None

    async def add(self, digest: str, refused: RefusedGrammar) -> None:
        self._kept[digest] = refused, self._clock() + TTL_S
        self._kept.move_to_end(digest)
        while len(self._kept) > MAX_GRAMMARS:
            self._kept.popitem(last=False)
