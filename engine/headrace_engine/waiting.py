"""The queue of sequences that wait for admission, smallest key first.

A heap with lazy removal: a cancelled sequence is dropped when it comes to the top, or with all the
others once they make up half of the heap, so that push, pop and discard are O(log n) amortised.
"""

from heapq import heapify, heappop, heappush

from .request import Sequence

Key = tuple[tuple[float, ...], int]


class WaitingQueue:
    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[tuple[Key, Sequence]] = []
        self._live: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._live)

    def push(self, key: Key, sequence: Sequence) -> None:
        """`key` is unique: sequences themselves are not compared."""
        assert sequence not in self._live, "the sequence already waits"
        heappush(self._heap, (key, sequence))
        self._live.add(sequence)

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][1] not in self._live:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Removes what `peek` shows. Raises IndexError where nothing waits."""
        sequence = self.peek()
        if sequence is None:
            raise IndexError("pop from an empty waiting queue")
        heappop(self._heap)
        self._live.remove(sequence)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Removes a sequence for good; nothing happens where it does not wait."""
        self._live.discard(sequence)
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapify(self._heap)
