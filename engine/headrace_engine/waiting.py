"""Queues of what waits, smallest key first.

Heaps with lazy removal: a discarded item is dropped when it comes to the top, or with all the
others once they make up half of the heap, so that push, pop and discard are O(log n) amortised and
a look at the first is O(1), however many wait.
"""

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, Protocol, TypeVar

from .request import EngineRequest, Sequence

Rank = tuple[float, ...]
Key = tuple[Rank, int]
K = TypeVar("K", bound=tuple[Any, ...])
T = TypeVar("T", bound=Hashable)


class Queue(Protocol):
    """Sequences that wait. Keys are unique: sequences themselves are not compared."""

    def __len__(self) -> int: ...

    def push(self, key: Key, sequence: Sequence) -> None: ...

    def peek(self) -> Sequence | None:
        """The one that is next."""

    def pop(self) -> Sequence:
        """Removes what `peek` shows. Raises IndexError where nothing waits."""

    def discard(self, sequence: Sequence) -> None:
        """Removes a sequence; nothing happens where it does not wait."""


class LazyHeap(Generic[K, T]):
    """Items by key. An item is in it once; it may come again after it left."""

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[tuple[K, T]] = []
        self._live: dict[T, K] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[T]:
        """The items, in no order."""
        return iter(self._live)

    def push(self, key: K, item: T) -> None:
        """`key` is unique: items themselves are not compared."""
        assert item not in self._live, "the item is already in the queue"
        heappush(self._heap, (key, item))
        self._live[item] = key

    def peek(self) -> T | None:
        heap, live = self._heap, self._live
        while heap and live.get(heap[0][1]) is not heap[0][0]:
            heappop(heap)
        return heap[0][1] if heap else None

    def peek_key(self) -> K | None:
        return None if self.peek() is None else self._heap[0][0]

    def pop(self) -> T:
        """Removes what `peek` shows. Raises IndexError where nothing waits."""
        item = self.peek()
        if item is None:
            raise IndexError("pop from an empty queue")
        heappop(self._heap)
        del self._live[item]
        return item

    def discard(self, item: T) -> None:
        """Removes an item; nothing happens where it is not there."""
        if self._live.pop(item, None) is None:
            return
        if len(self._heap) > 2 * len(self._live) + 16:
            live = self._live
            self._heap = [entry for entry in self._heap if live.get(entry[1]) is entry[0]]
            heapify(self._heap)


class WaitingQueue(LazyHeap[Key, Sequence]):
    """One order for all."""

    __slots__ = ()


class LaneQueue:
    """One queue a lane; next is the first of the lane whose level is the smallest.

    `lane_of` names a request's lane. `level_of` gives a lane's level, which may rise at any time
    but never falls: a lane whose level rose since it was looked at sinks when it comes to the top,
    so each rise costs at most O(log lanes).
    """

    def __init__(
        self, lane_of: Callable[[EngineRequest], str], level_of: Callable[[str], float]
    ) -> None:
        self._lane_of = lane_of
        self._level_of = level_of
        self._lanes: dict[str, WaitingQueue] = {}
        # (level when last looked at, order of opening, lane); a closed lane's entries are skipped.
        self._levels: list[tuple[float, int, str]] = []
        self._opened: dict[str, int] = {}
        self._openings = 0
        self._length = 0
        self.last_emptied: str | None = None

    def __len__(self) -> int:
        return self._length

    def has(self, lane: str) -> bool:
        """Whether anything waits in the lane."""
        return lane in self._lanes

    def first_lane(self) -> str | None:
        """The lane that is next."""
        levels = self._levels
        while levels:
            level, opening, lane = levels[0]
            if self._opened.get(lane) != opening:
                heappop(levels)
            elif (now := self._level_of(lane)) > level:
                heapreplace(levels, (now, opening, lane))
            else:
                return lane
        return None

    def push(self, key: Key, sequence: Sequence) -> None:
        lane = self._lane_of(sequence.request)
        queue = self._lanes.get(lane)
        if queue is None:
            queue = self._lanes[lane] = WaitingQueue()
            self._openings += 1
            self._opened[lane] = self._openings
            heappush(self._levels, (self._level_of(lane), self._openings, lane))
        queue.push(key, sequence)
        self._length += 1

    def peek(self) -> Sequence | None:
        lane = self.first_lane()
        return None if lane is None else self._lanes[lane].peek()

    def pop(self) -> Sequence:
        lane = self.first_lane()
        if lane is None:
            raise IndexError("pop from an empty queue")
        sequence = self._lanes[lane].pop()
        self._left(lane)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        lane = self._lane_of(sequence.request)
        queue = self._lanes.get(lane)
        if queue is None:
            return
        before = len(queue)
        queue.discard(sequence)
        if len(queue) < before:
            self._left(lane)

    def _left(self, lane: str) -> None:
        self._length -= 1
        if not self._lanes[lane]:
            del self._lanes[lane], self._opened[lane]
            self.last_emptied = lane
