"""Whose turn it is while more adapters are wanted than may run at once.

A queue of sequences that shows only those that have an adapter's slot, so that nobody else who asks
a queue need know of adapters. Nothing starves: while somebody waits for a slot, only so many of
adapters that have one may pass him; after that those wait behind him until one of them is done.
"""

from collections.abc import Callable, Iterable

from ..request import Sequence
from ..waiting import Key, LazyHeap, Queue

Running = Callable[[], Iterable[Sequence]]


class AdapterTurns:
    """Which adapters may run: at most `slots` different ones. `running` gives what runs now."""

    def __init__(self, slots: int, running: Running) -> None:
        self._slots = slots
        self._running = running

    def active(self) -> set[str]:
        """The adapters of running sequences."""
        found = {sequence.request.lora for sequence in self._running()}
        return {name for name in found if name is not None}

    def fits(self, sequence: Sequence, active: set[str] | None = None) -> bool:
        """Whether its adapter, where it has one, has a slot or can be given one."""
        name = sequence.request.lora
        if name is None:
            return True
        active = self.active() if active is None else active
        return name in active or self.has_room(active)

    def has_room(self, active: set[str]) -> bool:
        """Whether another adapter may run beside these."""
        return len(active) < self._slots


class SwappedQueue(LazyHeap[Key, Sequence]):
    """Sequences in host memory, of which the first waits until its adapter has a slot."""

    __slots__ = ("_turns",)

    def __init__(self, turns: AdapterTurns) -> None:
        super().__init__()
        self._turns = turns

    def peek(self) -> Sequence | None:
        head = super().peek()
        return head if head is None or self._turns.fits(head) else None


class AdapterQueue:
    """`queue` without the sequences whose adapter has no slot, which lie aside until it has one.

    `patience`: how many sequences of adapters that run may start before those that lie aside.
    """

    def __init__(self, queue: Queue, turns: AdapterTurns, patience: int) -> None:
        self._queue, self._turns = queue, turns
        self._patience = patience
        self._passed = 0
        self._keys: dict[Sequence, Key] = {}  # of all that have an adapter
        self._aside: dict[str, LazyHeap[Key, Sequence]] = {}

    def __len__(self) -> int:
        return len(self._queue) + sum(map(len, self._aside.values()))

    def push(self, key: Key, sequence: Sequence) -> None:
        if sequence.request.lora is not None:
            self._keys[sequence] = key
        self._queue.push(key, sequence)

    def peek(self) -> Sequence | None:
        """The first that may start. O(1) without adapters, else O(running) and amortised
        O(log waiting) for each that is put aside."""
        head = self._queue.peek()
        if not self._aside and (head is None or head.request.lora is None):
            return head
        active = self._turns.active()
        self._bring_back(active)
        while (head := self._queue.peek()) is not None and not self._may_start(head, active):
            self._put_aside(self._queue.pop())
        return head

    def pop(self) -> Sequence:
        sequence = self._queue.pop()
        if self._keys.pop(sequence, None) is not None and self._aside:
            self._passed += 1
        return sequence

    def discard(self, sequence: Sequence) -> None:
        name = sequence.request.lora
        if self._keys.pop(sequence, None) is not None and name in self._aside:
            self._aside[name].discard(sequence)
            if not self._aside[name]:
                del self._aside[name]
        self._queue.discard(sequence)

    def _may_start(self, sequence: Sequence, active: set[str]) -> bool:
        if sequence.request.lora in active and self._aside and self._passed >= self._patience:
            return False
        return self._turns.fits(sequence, active)

    def _put_aside(self, sequence: Sequence) -> None:
        name = sequence.request.lora
        assert name is not None, "only sequences with an adapter are put aside"
        self._aside.setdefault(name, LazyHeap()).push(self._keys[sequence], sequence)

    def _bring_back(self, active: set[str]) -> None:
        """Queues those again, first come first, whose adapter has a slot now or can be given one.

        One adapter at a time, so that each sequence moves once for each turn of its adapter.
        """
        turns = set(active)
        while self._aside:
            name = min(self._aside, key=self._first_key)
            if name not in turns and not self._turns.has_room(turns):
                break
            turns.add(name)
            self._passed = 0
            heap = self._aside.pop(name)
            for sequence in heap:
                self._queue.push(self._keys[sequence], sequence)

    def _first_key(self, name: str) -> Key:
        key = self._aside[name].peek_key()
        assert key is not None, "a heap without sequences is dropped"
        return key
