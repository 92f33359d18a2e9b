"""Block tables of sequences: prefix match, growth, fork, copy-on-write and release.

It decides which block holds which position and never touches KV memory: copies that must be made
are handed out as (source, destination) pairs. It never preempts; its caller asks what fits first.

    block_table   [ b0 ][ b1 ][ b2 ]     position p lies in block_table[p // block_size]
    positions     0 .... computed)       KV is there
                         [computed, end) is computed by the planned step, in blocks of its own

Between steps a table covers `computed` and no block more, so only the last block has unused room.

Where all layers of a model have a sliding window, blocks that no later position sees are released.
Their places in the table then name a later block of the sequence, which attention may read but
always masks; `Sequence.released` counts them.
"""

from array import array
from collections.abc import Iterable
from hashlib import sha256

from .block_pool import BlockPool
from .request import Sequence

Copies = list[tuple[int, int]]


class KVCache:
    """The block tables over one pool. `prefix_caching` False shares blocks by fork only.

    `window` is how many keys a position sees, its own included; None: all.
    """

    __slots__ = ("block_size", "pool", "prefix_caching", "window")

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        window: int | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.window = window

    def blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """The cached blocks that hold the sequence's first tokens; takes no reference.

        Never covers the last known token: its logits are wanted, so it must be computed; nor any
        of a request that wants those of its whole prompt. Valid until a block is
        allocated.
        """
        if not self.prefix_caching or sequence.request.params.prompt_logprobs is not None:
            return []
        blocks: list[int] = []
        for index in range((len(sequence.token_ids) - 1) // self.block_size):
            block = self.pool.lookup(self.block_hash(sequence, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def blocks_to_admit(self, sequence: Sequence, matched: list[int]) -> int:
        """Free blocks that all known tokens need: new ones, and matched ones that nobody uses."""
        ref_counts = self.pool.ref_counts
        in_use = sum(1 for block in matched if ref_counts[block] > 0)
        return self.blocks_for(len(sequence.token_ids)) - in_use

    def start(self, sequence: Sequence, matched: list[int]) -> None:
        """Gives a sequence without blocks those that `match_prefix` just found."""
        assert not sequence.block_table, "the sequence already has blocks"
        for block in matched:
            self.pool.share(block)
        sequence.block_table = matched
        sequence.computed = len(matched) * self.block_size

    def short(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Those that have no block of their own to write their next position to."""
        size, ref_counts, hashes = self.block_size, self.pool.ref_counts, self.pool.hashes
        return [
            sequence
            for sequence in sequences
            if sequence.computed >= len(table := sequence.block_table) * size
            or ref_counts[table[-1]] > 1
            or hashes[table[-1]] is not None
        ]

    def fit(self, sequence: Sequence, end: int) -> int:
        """The largest end of a run from `computed`, at most `end`, for which there are blocks."""
        free = self.pool.num_free - self._shares_next(sequence)
        if free < 0:
            return sequence.computed
        return min(end, (len(sequence.block_table) + free) * self.block_size)

    def extend(self, sequence: Sequence, end: int, copies: Copies) -> None:
        """Makes positions [computed, end) writable; appends the copies to make before that.

        A block that others share is copied. A cached block with no other user leaves the prefix
        cache instead, as a copy would cost a block and save nothing. No source of a copy is the
        destination of another one, so the copies of a step may run in any order.

        Raises OutOfBlocks where `fit` was not heeded.
        """
        table = sequence.block_table
        index = sequence.computed // self.block_size
        assert len(table) <= index + 1, "the table has blocks beyond its need"
        if self._shares_next(sequence):
            source = table[index]
            table[index] = self.pool.allocate()
            copies.append((source, table[index]))
            self.pool.release(source)
        elif index < len(table):
            self.pool.forget(table[index])
        for _ in range(self.blocks_for(end) - len(table)):
            table.append(self.pool.allocate())

    def fork(self, parent: Sequence, child: Sequence, length: int) -> None:
        """Shares the blocks of the first `length` tokens, which both have and parent has computed.

        A child that knows no more than those is left to compute the last of them itself, for logits
        of its own.
        """
        assert not child.block_table and parent.computed >= length > 0
        child.block_table = parent.block_table[: self.blocks_for(length)]
        self._share(parent, child)
        child.block_hashes = parent.block_hashes[: length // self.block_size]
        child.computed = min(length, len(child.token_ids) - 1)

    def branch(self, parent: Sequence, child: Sequence) -> None:
        """Shares all that the parent has computed; both know the same tokens up to there."""
        assert not child.block_table
        child.block_table = parent.block_table.copy()
        self._share(parent, child)
        child.block_hashes = parent.block_hashes[: parent.computed // self.block_size]
        child.computed = parent.computed

    def slide(self, sequence: Sequence) -> None:
        """Releases the blocks of which no position from the last computed one on sees anything."""
        if self.window is None:
            return
        table, first = sequence.block_table, (sequence.computed - self.window) // self.block_size
        if first <= sequence.released:
            return
        for index in range(sequence.released, first):
            self.pool.release(table[index])
        table[:first] = [table[first]] * first
        sequence.released = first

    def register(self, sequence: Sequence, start: int, end: int) -> None:
        """Puts the blocks that the computed run [start, end) filled into the prefix cache."""
        if not self.prefix_caching:
            return
        for index in range(start // self.block_size, end // self.block_size):
            self.pool.register(sequence.block_table[index], self.block_hash(sequence, index))

    def truncate(self, sequence: Sequence) -> None:
        """Releases the blocks behind `computed`, which held drafts that were rejected."""
        keep = self.blocks_for(sequence.computed)
        for block in reversed(sequence.block_table[keep:]):
            self.pool.release(block)
        del sequence.block_table[keep:]

    def free(self, sequence: Sequence) -> None:
        """Releases all blocks, last first: the tail of a prefix is evicted before its head."""
        for block in reversed(sequence.block_table[sequence.released :]):
            self.pool.release(block)
        sequence.block_table = []
        sequence.computed = sequence.released = 0

    def _share(self, parent: Sequence, child: Sequence) -> None:
        child.released = parent.released
        for block in child.block_table[child.released :]:
            self.pool.share(block)

    def _shares_next(self, sequence: Sequence) -> bool:
        index = sequence.computed // self.block_size
        table = sequence.block_table
        return index < len(table) and self.pool.ref_counts[table[index]] > 1

    def block_hash(self, sequence: Sequence, index: int) -> bytes:
        """SHA-256 over the hash of the block before and the tokens; the first follows the seed.

        Collision-resistant, since a forged hit would hand one user's context to another.
        """
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            begin = len(hashes) * self.block_size
            tokens = array("q", sequence.token_ids[begin : begin + self.block_size])
            before = hashes[-1] if hashes else sequence.request.prefix_seed
            hashes.append(sha256(before + tokens.tobytes()).digest())
        return hashes[index]


def unused_slots(running: Iterable[Sequence], block_size: int) -> int:
    """Positions without KV in the blocks of `running`; all are in last blocks, shared or not."""
    # Of those that share a last block, all but one are about to leave it.
    unused = {
        table[-1]: len(table) * block_size - sequence.computed
        for sequence in running
        if (table := sequence.block_table)
    }
    return sum(unused.values())
