"""Queues for sequences whose LoRA adapters compete for slots.

A queue shows only sequences whose adapter has a slot or can get one, so that the rest of the
scheduler need not know about adapters. No sequence starves: while one waits for a slot, only a
limited number of sequences whose adapters have slots may start before it.
"""

from collections.abc import Callable, Iterable

from ..core.request import Sequence
from .request_queue import Key, LazyHeap, Queue

Running = Callable[[], Iterable[Sequence]]


class LoRASlots:
    """Lets at most `slots` adapters run at once. `running` gives the running sequences."""

    def __init__(self, slots: int, running: Running) -> None:
        self._slots = slots
        self._running = running

    def in_use(self) -> set[str]:
        """The adapters of the running sequences."""
        found = {sequence.request.lora for sequence in self._running()}
        return {name for name in found if name is not None}

    def fits(self, sequence: Sequence, in_use: set[str] | None = None) -> bool:
        """Whether the sequence has no adapter, or one that has a slot or can get one."""
        name = sequence.request.lora
        if name is None:
            return True
        in_use = self.in_use() if in_use is None else in_use
        return name in in_use or self.has_room(in_use)

    def has_room(self, in_use: set[str]) -> bool:
        """Whether a slot is left beside these adapters."""
        return len(in_use) < self._slots


class SwappedQueue(LazyHeap[Key, Sequence]):
    """Sequences in host memory. The first one waits until its adapter can get a slot."""

    __slots__ = ("_lora_slots",)

    def __init__(self, lora_slots: LoRASlots) -> None:
        super().__init__()
        self._lora_slots = lora_slots

    def peek(self) -> Sequence | None:
        head = super().peek()
        return head if head is None or self._lora_slots.fits(head) else None


class LoRAQueue:
    """Wraps `queue` and puts sequences aside while their adapters have no slot.

    While any are aside, at most `patience` sequences whose adapters have slots may start.
    """

    def __init__(self, queue: Queue, lora_slots: LoRASlots, patience: int) -> None:
        self._queue, self._lora_slots = queue, lora_slots
        self._patience = patience
        self._passed = 0
        self._keys: dict[Sequence, Key] = {}  # of the sequences that have an adapter
        self._aside: dict[str, LazyHeap[Key, Sequence]] = {}

    def __len__(self) -> int:
        return len(self._queue) + sum(map(len, self._aside.values()))

    def push(self, key: Key, sequence: Sequence) -> None:
        if sequence.request.lora is not None:
            self._keys[sequence] = key
        self._queue.push(key, sequence)

    def peek(self) -> Sequence | None:
        """The first sequence that may start.

        O(1) without adapters, else O(running) and amortised O(log waiting) for each sequence that
        is put aside.
        """
        head = self._queue.peek()
        if not self._aside and (head is None or head.request.lora is None):
            return head
        in_use = self._lora_slots.in_use()
        self._bring_back(in_use)
        while (head := self._queue.peek()) is not None and not self._may_start(head, in_use):
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

    def _may_start(self, sequence: Sequence, in_use: set[str]) -> bool:
        if sequence.request.lora in in_use and self._aside and self._passed >= self._patience:
            return False
        return self._lora_slots.fits(sequence, in_use)

    def _put_aside(self, sequence: Sequence) -> None:
        name = sequence.request.lora
        assert name is not None, "only sequences with an adapter are put aside"
        self._aside.setdefault(name, LazyHeap()).push(self._keys[sequence], sequence)

    def _bring_back(self, in_use: set[str]) -> None:
        """Queues sequences again whose adapter has a slot or can get one, oldest adapter first.

        All sequences of an adapter move at once, so each moves once for each slot it gets.
        """
        in_use = set(in_use)
        while self._aside:
            name = min(self._aside, key=self._first_key)
            if name not in in_use and not self._lora_slots.has_room(in_use):
                break
            in_use.add(name)
            self._passed = 0
            heap = self._aside.pop(name)
            for sequence in heap:
                self._queue.push(self._keys[sequence], sequence)

    def _first_key(self, name: str) -> Key:
        key = self._aside[name].peek_key()
        assert key is not None, "a heap without sequences is dropped"
        return key
