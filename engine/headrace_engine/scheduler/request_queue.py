"""Queues of waiting sequences, smallest key first.

They are heaps with lazy removal: discarded items are dropped when they come to the top, or all at
once when they are half of the heap. So push, pop and discard are amortised O(log n), and peek is
amortised O(1).
"""

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, Protocol, TypeVar

from ..core.request import Sequence

Rank = tuple[float, ...]
Key = tuple[Rank, int]
K = TypeVar("K", bound=tuple[Any, ...])
T = TypeVar("T", bound=Hashable)


class Queue(Protocol):
    """A queue of sequences. Keys are unique, so that sequences are never compared."""

    def __len__(self) -> int: ...

    def push(self, key: Key, sequence: Sequence) -> None: ...

    def peek(self) -> Sequence | None:
        """The next sequence; None if there is none."""

    def pop(self) -> Sequence:
        """Removes and returns the next sequence. Raises IndexError if there is none."""

    def discard(self, sequence: Sequence) -> None:
        """Removes a sequence, if it is in the queue."""


class LazyHeap(Generic[K, T]):
    """A heap of items by key. An item is in it at most once; it may return after it left."""

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[tuple[K, T]] = []
        self._live: dict[T, K] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[T]:
        """The items, in no particular order."""
        return iter(self._live)

    def push(self, key: K, item: T) -> None:
        """Adds an item. `key` must be unique: items are never compared."""
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
        """Removes and returns the next item. Raises IndexError if there is none."""
        item = self.peek()
        if item is None:
            raise IndexError("pop from an empty queue")
        heappop(self._heap)
        del self._live[item]
        return item

    def discard(self, item: T) -> None:
        """Removes an item, if it is in the heap."""
        if self._live.pop(item, None) is None:
            return
        if len(self._heap) > 2 * len(self._live) + 16:
            live = self._live
            self._heap = [entry for entry in self._heap if live.get(entry[1]) is entry[0]]
            heapify(self._heap)


class WaitingQueue(LazyHeap[Key, Sequence]):
    """A queue with one order for all sequences."""

    __slots__ = ()


class TenantQueues:
    """A queue for each tenant; the next sequence is that of the tenant with the smallest counter.

    `counter_of` gives a tenant's counter, which may rise at any time but never falls. A tenant
    whose counter has risen sinks when it comes to the top, so each rise costs at most
    O(log tenants).
    """

    def __init__(self, counter_of: Callable[[str], float]) -> None:
        self._counter_of = counter_of
        self._queues: dict[str, WaitingQueue] = {}
        # (counter when last read, order of opening, tenant); entries of closed queues are skipped.
        self._counters: list[tuple[float, int, str]] = []
        self._opened: dict[str, int] = {}
        self._openings = 0
        self._length = 0
        self.last_emptied: str | None = None

    def __len__(self) -> int:
        return self._length

    def has(self, tenant: str) -> bool:
        """Whether the tenant has anything waiting."""
        return tenant in self._queues

    def first_tenant(self) -> str | None:
        """The tenant of the next sequence; None if nothing waits."""
        counters = self._counters
        while counters:
            counter, opening, tenant = counters[0]
            if self._opened.get(tenant) != opening:
                heappop(counters)
            elif (now := self._counter_of(tenant)) > counter:
                heapreplace(counters, (now, opening, tenant))
            else:
                return tenant
        return None

    def push(self, key: Key, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = WaitingQueue()
            self._openings += 1
            self._opened[tenant] = self._openings
            heappush(self._counters, (self._counter_of(tenant), self._openings, tenant))
        queue.push(key, sequence)
        self._length += 1

    def peek(self) -> Sequence | None:
        tenant = self.first_tenant()
        return None if tenant is None else self._queues[tenant].peek()

    def pop(self) -> Sequence:
        tenant = self.first_tenant()
        if tenant is None:
            raise IndexError("pop from an empty queue")
        sequence = self._queues[tenant].pop()
        self._left(tenant)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            return
        before = len(queue)
        queue.discard(sequence)
        if len(queue) < before:
            self._left(tenant)

    def _left(self, tenant: str) -> None:
        self._length -= 1
        if not self._queues[tenant]:
            del self._queues[tenant], self._opened[tenant]
            self.last_emptied = tenant
