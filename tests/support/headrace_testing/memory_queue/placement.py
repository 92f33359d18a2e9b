"""Finds requests that an engine may take before the next one, by the rules of
lua/precedence.lua."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from headrace_common.protocol.base import Placement

from .fairness import Counters
from .records import Record

PASSES = 16
SLACK = 8192
WINDOW = 10
CHOICE = 4


class Placed:
    """Waiting requests by the engine and priority that they are placed with, the oldest first."""

    def __init__(self) -> None:
        self._lists: defaultdict[tuple[int, str], list[str]] = defaultdict(list)

    def add(self, priority: int, engine: str, request_id: str) -> None:
        self._lists[priority, engine].append(request_id)

    def remove(self, priority: int, engine: str, request_id: str) -> None:
        waiting = self._lists.get((priority, engine), [])
        if request_id in waiting:
            waiting.remove(request_id)

    def first(self, priority: int, engine: str) -> list[str]:
        return self._lists.get((priority, engine), [])[:CHOICE]

    def count(self, engine: str) -> int:
        return sum(len(self._lists.get((priority, engine), ())) for priority in (1, 2, 3))


def choose(placement: Placement, running: Mapping[str, int], waiting: int, placed: Placed) -> str:
    """Chooses, like the Redis script ADMIT, the first engine whose load is within its bound, or
    ""."""
    total = sum(running.values()) + waiting + 1
    capacity = placement.capacity / placement.shards
    for candidate in placement.candidates:
        own = candidate.capacity / placement.shards
        bound: float = math.ceil(placement.load_factor * total * own / capacity)
        if total <= capacity:
            bound = min(bound, own)
        if running.get(candidate.engine_id, 0) + placed.count(candidate.engine_id) < bound:
            return candidate.engine_id
    return ""


def first_own(
    record: Record, candidates: Sequence[tuple[str, Record]], room: float, counters: Counters
) -> str | None:
    """The engine's own request that goes before the next one, or None."""
    if record.passes >= PASSES:
        return None
    for rid, own in candidates:
        fits = own.prompt_tokens <= room
        timely = own.admitted <= record.admitted + WINDOW * record.hold
        slack = counters.used(own.tenant) - counters.used(record.tenant)
        if fits and timely and (own.tenant == record.tenant or slack <= SLACK):
            return rid
    return None


def free_at(record: Record, oldest: Iterable[float]) -> float:
    """The time from which any engine may take the next request.

    `oldest` has the admission times of the requests after it.
    """
    return min((record.admitted, *oldest)) + record.hold
