"""Parts of the queue in memory: a model's shards, the state of one TAKE, streams of messages."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from headrace_common.protocol.base import CanaryPlan, EngineStatus, TakeBounds
from headrace_common.protocol.ledger import UsageEntry
from headrace_common.protocol.variants import STABLE, EngineSide

from .fairness import Counters, FairQueue
from .placement import Placed
from .records import Ending, Record, Taken

RATE_WINDOW = 30.0
PATIENCE = 10.0


class Shard:
    """One model's queue: waiting request ids by priority class (1-3), and all records."""

    def __init__(self) -> None:
        self.clear()
        self.records: dict[str, Record] = {}
        self.images: dict[bytes, bytes] = {}  # by digest
        self.image_tenants: dict[bytes, str] = {}
        self.image_requests: defaultdict[bytes, set[str]] = defaultdict(set)
        self.statuses: dict[str, tuple[float, EngineStatus]] = {}
        self.dead_letters: list[tuple[str, str, int]] = []
        self.ledger: list[UsageEntry] = []
        self.due = {2: 0, 3: 0}
        self.canary_plan: CanaryPlan | None = None
        self.side_beats: dict[str, float] = {}  # when each side's engines last wrote one
        self.rate = 0.0
        self.rated: float | None = None
        self.first_rated = 0.0
        self.wakeups = 0
        self.changed = asyncio.Condition()

    def clear(self) -> None:
        """Removes all waiting requests and the tenants' counters."""
        self.counters = Counters()
        self.tallied_at = -math.inf
        self.waiting = {priority: FairQueue(self.counters) for priority in (1, 2, 3)}
        self.placed = Placed()

    def started(self) -> Iterable[tuple[str, Record]]:
        """The running requests, the oldest first."""
        return [(rid, r) for rid, r in self.records.items() if r.state == "running"]

    def count_ending(self, now: float) -> None:
        last = now if self.rated is None else self.rated
        if self.rated is None:
            self.first_rated = now
        faded = self.rate * math.exp(-max(0.0, now - last) / RATE_WINDOW)
        self.rate, self.rated = faded + 1 / RATE_WINDOW, now

    def drain_rate(self, now: float) -> float:
        if self.rated is None:
            return 0.0
        faded = self.rate * math.exp(-max(0.0, now - self.rated) / RATE_WINDOW)
        return faded / -math.expm1(-max(1.0, now - self.first_rated) / RATE_WINDOW)


@dataclass(slots=True)
class Round:
    """The state of one TAKE.

    It may take `most` requests, and prompt tokens while there is `room`. `stopped` says that the
    next request does not fit or, until `free_at`, belongs to another engine. `adapters` are those
    that the engine has loaded, and ""; `lacking` are priorities whose first request is none that
    the engine takes. It may take `low_room` requests of low priority (None: any number). `side` is
    its side.
    """

    engine: str
    most: int
    room: float
    adapters: set[str] = field(default_factory=lambda: {""})
    bounds: TakeBounds = TakeBounds()
    lacking: set[int] = field(default_factory=set)
    low_room: int | None = None
    side: EngineSide = field(default_factory=lambda: EngineSide(alone=True))
    taken: list[Taken] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    stopped: bool = False
    free_at: float = math.inf

    def takes(self, record: Record, now: float) -> bool:
        """Whether the engine takes the request, if there is room."""
        return (
            record.required in self.adapters
            and self._is_of_side(record, now)
            and self._is_within_bounds(record, now)
        )

    def _is_of_side(self, record: Record, now: float) -> bool:
        if self.side.alone or record.variant == self.side.variant:
            return True
        return self.side.variant == STABLE and now - record.admitted >= PATIENCE

    def _is_within_bounds(self, record: Record, now: float) -> bool:
        late = now - record.admitted >= self.bounds.hold
        return late or self.bounds.includes(record.prompt_tokens)

    @property
    def left(self) -> int:
        """How many more requests it may take."""
        return self.most - len(self.taken)


class Log:
    """A stream of messages on which readers can wait; a reader keeps its own position.

    Each message has a number that grows over all logs of a backend.
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        self.items: list[tuple[int, bytes]] = []
        self.changed = asyncio.Condition()
        self._numbers = numbers

    async def add(self, data: bytes) -> None:
        self.items.append((next(self._numbers), data))
        async with self.changed:
            self.changed.notify_all()
