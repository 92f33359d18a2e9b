"""The host side of the KV cache: blocks of swapped sequences, and blocks of prefixes.

It assigns host blocks and lists the copies to make; it touches no memory. Full blocks are found by
the hash of their content, so blocks that several sequences share are stored once. Blocks of
prefixes are kept while no swapped sequence needs their memory, the least recently used are
overwritten first.
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
        # Blocks that the scheduled step reads or writes; they are released after it.
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

    def matching(self, sequence: Sequence, rows: int) -> list[int]:
        """The host blocks of the rows after the first `rows`, as far as all of them are known.

        Like `match_prefix`, it never covers the last known token. Valid until a block is saved.
        """
        found: list[int] = []
        if not self._kv.reuses_prefixes(sequence):
            return found
        for row in range(rows, (len(sequence.token_ids) - 1) // self._kv.block_size):
            block = self.pool.lookup(self._kv.block_hash(sequence, row))
            if block is None:
                break
            found.append(block)
        return found

    def load(self, sequence: Sequence, host_blocks: list[int], moves: Moves) -> None:
        """Gives a started sequence device blocks with the content of `host_blocks`, its next rows.

        Appends the (host, device) copies to `moves`. The caller has checked that blocks are free.
        """
        for host in host_blocks:  # before the device evicts blocks, which are saved here
            self.pool.share(host)
        begin = sequence.num_computed_tokens
        for host in host_blocks:
            device = self._kv.pool.allocate()
            sequence.block_table.append(device)
            moves.append((host, device))
        sequence.num_computed_tokens += len(host_blocks) * self._kv.block_size
        self._kv.register(sequence, begin, sequence.num_computed_tokens)
        self.unsettled += host_blocks

    def save(self, block_hash: bytes) -> int | None:
        """A host block to copy a block of a prefix to, in the step that is scheduled now.

        None if the content is known here already, or if sequences use all blocks.
        """
        if self.pool.lookup(block_hash) is not None or not self.pool.num_free:
            return None
        host = self.pool.allocate()
        self.pool.register(host, block_hash)
        self.unsettled.append(host)
        return host

    def free(self, sequence: Sequence) -> None:
        """Releases the host blocks of a swapped sequence."""
        for block in reversed(sequence.host_blocks):
            self.pool.release(block)
        sequence.host_blocks = []
        sequence.num_computed_tokens = 0

    def settle(self) -> None:
        """Releases the blocks that the last step copied from or to."""
        for block in reversed(self.unsettled):
            self.pool.release(block)
        self.unsettled.clear()

    def _known(self, sequence: Sequence) -> list[int | None]:
        """For each full computed block: the host block with the same content, or None."""
        full = sequence.num_computed_tokens // self._kv.block_size
        return [self.pool.lookup(self._kv.block_hash(sequence, index)) for index in range(full)]
