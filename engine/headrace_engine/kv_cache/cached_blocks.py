"""A filter of the hashes of the full blocks that the device and the host have cached.

The engine's thread reports each block that enters or leaves a prefix cache. Another thread takes
the changed bits: it sees every change, since a bit is listed after its count has changed.
"""

from array import array
from collections import deque

from headrace_common.wire.block_hashes import HASH_BYTES, block_position


class CachedBlocks:
    """Counts the blocks whose hashes begin with the same `bits` bits."""

    __slots__ = ("_changed", "_counts", "bits")

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self._counts = array("I", bytes(4 << bits))
        self._changed: deque[int] = deque()

    @property
    def has_changes(self) -> bool:
        return bool(self._changed)

    def add(self, block_hash: bytes) -> None:
        """A prefix cache has a block. Ignores keys of other things, which are longer."""
        if len(block_hash) != HASH_BYTES:
            return
        position = block_position(block_hash, self.bits)
        self._counts[position] += 1
        if self._counts[position] == 1:
            self._changed.append(position)

    def remove(self, block_hash: bytes) -> None:
        """A prefix cache that had a block has it no longer."""
        if len(block_hash) != HASH_BYTES:
            return
        position = block_position(block_hash, self.bits)
        self._counts[position] -= 1
        if not self._counts[position]:
            self._changed.append(position)

    def take_changes(self) -> dict[int, bool]:
        """The bits that have changed since the last call, and whether they are set now."""
        taken: dict[int, bool] = {}
        for _ in range(len(self._changed)):
            position = self._changed.popleft()  # first: a later change lists it once more
            taken[position] = self._counts[position] > 0
        return taken
