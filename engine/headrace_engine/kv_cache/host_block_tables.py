"""The host side of the KV cache: blocks of sequences that were swapped out of device memory.

It assigns host blocks and lists the copies to make; it touches no memory. Full blocks are found by
the hash of their content, so blocks that several swapped sequences share are stored once.
"""

from ..core.request import Sequence
from .block_pool import BlockPool
from .kv_cache_manager import KVCacheManager

Moves = list[tuple[int, int]]


class HostBlockTables:
    """The host blocks of one KVCacheManager with a single group. A step's copies out are made
    before its copies in."""

    __slots__ = ("_kv", "unsettled", "pool")

    def __init__(self, num_blocks: int, kv: KVCacheManager) -> None:
        self.pool = BlockPool(num_blocks)
        self._kv = kv
        # Blocks that the scheduled step still reads; they are released after it.
        self.unsettled: list[int] = []

    def fits(self, sequence: Sequence) -> bool:
        """Whether the sequence's computed tokens fit the free host blocks."""
        needed = self._kv.rows_for(sequence.num_computed_tokens)
        for block in self._known(sequence):
            needed -= block is not None and self.pool.ref_counts[block] > 0
        return needed <= self.pool.num_free

    def swap_out(self, sequence: Sequence, moves: Moves) -> None:
        """Assigns host blocks to the computed tokens; appends the (device, host) copies to `moves`.

        The caller has checked `fits`, and releases the device blocks afterwards.
        """
        known = self._known(sequence)
        for block in known:
            if block is not None:
                self.pool.share(block)
        table = sequence.block_table[: self._kv.rows_for(sequence.num_computed_tokens)]
        for index, source in enumerate(table):
            host = known[index] if index < len(known) else None
            if host is None:
                host = self.pool.allocate()
                moves.append((source, host))
                if index < len(known):
                    self.pool.register(host, self._kv.block_hash(sequence, index))
            sequence.host_blocks.append(host)

    def swap_in(self, sequence: Sequence, matched: list[int], moves: Moves) -> None:
        """Gives a swapped sequence device blocks; appends the (host, device) copies to `moves`.

        `matched` are the device blocks that `match_prefix` has just found: they need no copy.
        """
        computed, host_blocks = sequence.num_computed_tokens, sequence.host_blocks
        self._kv.start(sequence, matched)
        for host in host_blocks[len(matched) :]:
            device = self._kv.pool.allocate()
            sequence.block_table.append(device)
            moves.append((host, device))
        sequence.num_computed_tokens = max(computed, sequence.num_computed_tokens)
        self._kv.register(sequence, 0, computed)
        self.unsettled += host_blocks
        sequence.host_blocks = []

    def free(self, sequence: Sequence) -> None:
        """Releases the host blocks of a swapped sequence."""
        for block in reversed(sequence.host_blocks):
            self.pool.release(block)
        sequence.host_blocks = []
        sequence.num_computed_tokens = 0

    def settle(self) -> None:
        """Releases the blocks that the last step swapped in."""
        for block in reversed(self.unsettled):
            self.pool.release(block)
        self.unsettled.clear()

    def _known(self, sequence: Sequence) -> list[int | None]:
        """For each full computed block: the host block with the same content, or None."""
        full = sequence.num_computed_tokens // self._kv.block_size
        return [self.pool.lookup(self._kv.block_hash(sequence, index)) for index in range(full)]
