"""The host side of the KV cache: blocks of sequences that were swapped out of device memory.

It decides which host block holds what and hands out the copies to make; it touches no memory. A
full block is found again by the hash of its content, so what several swapped sequences share lies
in host memory once.
"""

from .block_pool import BlockPool
from .kv_cache import KVCache
from .request import Sequence

Moves = list[tuple[int, int]]


class HostCache:
    """Host blocks beside one KVCache, whose layers are one group. A step's copies out are made
    before its copies in."""

    __slots__ = ("_kv", "_read", "pool")

    def __init__(self, num_blocks: int, kv: KVCache) -> None:
        self.pool = BlockPool(num_blocks)
        self._kv = kv
        # Blocks that copies of the planned step still read.
        self._read: list[int] = []

    @property
    def unsettled(self) -> list[int]:
        """Blocks that are given up once the step that copies them in is over."""
        return self._read

    def fits(self, sequence: Sequence) -> bool:
        """Whether there are host blocks for all that the sequence has computed."""
        needed = self._kv.rows_for(sequence.computed)
        for block in self._known(sequence):
            needed -= block is not None and self.pool.ref_counts[block] > 0
        return needed <= self.pool.num_free

    def swap_out(self, sequence: Sequence, moves: Moves) -> None:
        """Gives the computed tokens host blocks; appends (device, host) blocks to copy.

        `fits` was asked. The sequence's device blocks stay its own until they are freed.
        """
        known = self._known(sequence)
        for block in known:
            if block is not None:
                self.pool.share(block)
        table = sequence.block_table[: self._kv.rows_for(sequence.computed)]
        for index, source in enumerate(table):
            host = known[index] if index < len(known) else None
            if host is None:
                host = self.pool.allocate()
                moves.append((source, host))
                if index < len(known):
                    self.pool.register(host, self._kv.block_hash(sequence, index))
            sequence.host_blocks.append(host)

    def swap_in(self, sequence: Sequence, matched: list[int], moves: Moves) -> None:
        """Gives a swapped sequence device blocks; appends (host, device) blocks to copy.

        `matched` are device blocks that `match_prefix` just found: they need no copy.
        """
        computed, host_blocks = sequence.computed, sequence.host_blocks
        self._kv.start(sequence, matched)
        for host in host_blocks[len(matched) :]:
            device = self._kv.pool.allocate()
            sequence.block_table.append(device)
            moves.append((host, device))
        sequence.computed = max(computed, sequence.computed)
        self._kv.register(sequence, 0, computed)
        self._read += host_blocks
        sequence.host_blocks = []

    def free(self, sequence: Sequence) -> None:
        """Gives up a swapped sequence's blocks."""
        for block in reversed(sequence.host_blocks):
            self.pool.release(block)
        sequence.host_blocks = []
        sequence.computed = 0

    def settle(self) -> None:
        """Gives up the blocks that were swapped in: the step that reads them is over."""
        for block in reversed(self._read):
            self.pool.release(block)
        self._read.clear()

    def _known(self, sequence: Sequence) -> list[int | None]:
        """For each full computed block, the host block with its content, if there is one."""
        full = sequence.computed // self._kv.block_size
        return [self.pool.lookup(self._kv.block_hash(sequence, index)) for index in range(full)]
