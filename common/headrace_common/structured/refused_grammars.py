"""Remembers grammars that were too expensive to compile, so that they are refused for a while."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..pools.limited_pool import KillReason

TTL_S = 3600.0
MOST = 4096
# Attempts that a busy machine may have ended; after them the grammar is refused.
ATTEMPTS = 3
_DOUBTFUL = frozenset({KillReason.TIMEOUT, KillReason.DIED})


@dataclass(frozen=True, slots=True)
class RefusedGrammar:
    """A refused grammar. `attempts` is how often any process has tried it."""

    reason: KillReason
    attempts: int

    @property
    def final(self) -> bool:
        """Whether it is not to be tried again."""
        return self.reason not in _DOUBTFUL or self.attempts >= ATTEMPTS


class RefusedGrammars(Protocol):
    """Refused grammars by digest, the same for all tenants."""

    async def find(self, digest: str) -> RefusedGrammar | None: ...

    async def add(self, digest: str, refused: RefusedGrammar) -> None:
        """Remembers a refused grammar for TTL_S."""


class LocalRefusedGrammars:
    """Refused grammars of this process only: the `MOST` latest ones."""

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
