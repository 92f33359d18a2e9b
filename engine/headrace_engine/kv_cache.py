"""Block tables of sequences: prefix match, growth, fork, copy-on-write and release.

It decides which block holds which position and never touches KV memory: copies that must be made
are handed out as (source, destination) pairs. It never preempts; its caller asks what fits first.

    block_table   [ b0 ][ b1 ][ b2 ]     position p lies in row p // block_size
    positions     0 .... computed)       KV is there
                         [computed, end) is computed by the planned step, in blocks of its own

A row has a block for each group of layers, one after the other: groups that keep all positions
first (see kv_groups). Between steps a table covers `computed` and no row more, so only blocks of
the last row have unused room.

Of sliding groups, blocks that no later position sees are released. Their places in the table then
name a later block of that group and sequence, which attention may read but always masks;
`Sequence.released` counts the rows.
"""

from array import array
from collections.abc import Iterable
from hashlib import sha256

from .block_pool import BlockPool
from .kv_groups import KVGroups
from .request import Sequence

Copies = list[tuple[int, int]]


class KVCache:
    """The block tables over one pool. `prefix_caching` False shares blocks by fork only.

    `groups` are those of the model's layers; None: one, which keeps all positions. `max_run` is
    the most positions of a sequence that a step computes.
    """

    __slots__ = ("_marks", "block_size", "groups", "max_run", "pool", "prefix_caching")

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        groups: KVGroups | None = None,
        max_run: int = 1,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.groups = groups or KVGroups()
        self.max_run = max_run
        # What tells the blocks of a row apart in the prefix cache.
        self._marks = [bytes((group,)) if group else b"" for group in range(self.groups.count)]

    def rows_for(self, length: int) -> int:
        """That hold so many positions."""
        return -(-length // self.block_size)

    def rows_of(self, table: list[int]) -> int:
        return len(table) // self.groups.count

    def held(self, sequence: Sequence) -> list[int]:
        """The blocks to which the sequence has a reference, the first rows first."""
        table, count, full = sequence.block_table, self.groups.count, self.groups.full
        behind = sequence.released * count
        if not behind:
            return table
        kept = [table[row + group] for row in range(0, behind, count) for group in range(full)]
        return kept + table[behind:]

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """A table of the cached blocks of the sequence's first tokens; takes no reference.

        Never covers the last known token: its logits are wanted, so it must be computed; nor any
        of a request that wants those of its whole prompt. Sliding groups have the blocks that the
        next position sees. Valid until a block is allocated.
        """
        if not self.prefix_caching or sequence.request.params.prompt_logprobs is not None:
            return []
        groups, rows = self.groups, (len(sequence.token_ids) - 1) // self.block_size
        if groups.window is not None and sequence.request.forks:
            # The others begin at the end of the prompt, and see what comes before it.
            rows = min(rows, sequence.prompt_length // self.block_size)
        kept: list[int] = []
        if groups.full:
            kept = self._leading(sequence, rows)
            rows = len(kept) // groups.full
        return kept if groups.window is None else self._beside(sequence, kept, rows)

    def _leading(self, sequence: Sequence, rows: int) -> list[int]:
        """The cached blocks of groups that keep all positions, up to the first row that lacks one,
        of at most so many."""
        blocks: list[int] = []
        groups = range(self.groups.full)
        for row in range(rows):
            cached = self._cached(sequence, row, groups)
            if not cached:
                break
            blocks += cached
        return blocks

    def _beside(self, sequence: Sequence, kept: list[int], rows: int) -> list[int]:
        """The table of the most rows, up to `rows`, at whose end the sliding groups' blocks are
        cached, with the `kept` blocks of other groups."""
        sliding, full = range(self.groups.full, self.groups.count), self.groups.full
        wanted = self._window_rows()
        seen: list[list[int]] = []
        for row in range(rows - 1, -1, -1):
            cached = self._cached(sequence, row, sliding)
            if cached:
                seen.append(cached)
            else:
                seen.clear()
            if len(seen) == wanted:
                rows = row + wanted
                break
        else:
            rows = len(seen)
        seen.reverse()
        first = rows - len(seen)
        table: list[int] = []
        for row in range(rows):
            table += kept[row * full : (row + 1) * full] + seen[max(0, row - first)]
        return table

    def _cached(self, sequence: Sequence, row: int, groups: range) -> list[int]:
        """A row's blocks of some groups; empty where one is not cached."""
        lookup, key = self.pool.lookup, self.block_hash(sequence, row)
        marked = [lookup(key + self._marks[group]) for group in groups]
        found = [block for block in marked if block is not None]
        return found if len(found) == len(groups) else []

    def _window_rows(self) -> int:
        """Rows of a sliding group that hold all that is seen by a position which they end before,
        and by the one before it."""
        return self.rows_for(self.groups.window or 0)

    def _released_rows(self, matched: list[int]) -> int:
        """Of a table that `match_prefix` made, the rows before those that sliding groups have."""
        rows = self.rows_of(matched)
        return 0 if self.groups.window is None else max(0, rows - self._window_rows())

    def blocks_to_admit(self, sequence: Sequence, matched: list[int]) -> int:
        """Free blocks that all known tokens need: new ones, and matched ones that nobody uses."""
        groups, rows = self.groups, self.rows_for(len(sequence.token_ids))
        needed = groups.full * rows - self._in_use(matched, range(groups.full), 0)
        if groups.window is None:
            return needed
        first, sliding = self._released_rows(matched), range(groups.full, groups.count)
        own = groups.sliding * (rows - first) - self._in_use(matched, sliding, first)
        return needed + min(own, groups.sliding * groups.kept(self.block_size, self.max_run))

    def _in_use(self, table: list[int], groups: range, first: int) -> int:
        """Blocks of some groups that others use, from row `first` on."""
        count, ref_counts = self.groups.count, self.pool.ref_counts
        rows = [table[first * count + group :: count] for group in groups]
        return sum(1 for blocks in rows for block in blocks if ref_counts[block] > 0)

    def growth(self, sequence: Sequence) -> int:
        """The blocks that it still needs for all tokens it knows, but for copies of shared ones."""
        groups, rows = self.groups, self.rows_of(sequence.block_table)
        missing = max(0, self.rows_for(len(sequence.token_ids)) - rows)
        if groups.window is None:
            return missing * groups.count
        room = groups.kept(self.block_size, self.max_run) - (rows - sequence.released)
        return groups.full * missing + groups.sliding * min(missing, max(0, room))

    def start(self, sequence: Sequence, matched: list[int]) -> None:
        """Gives a sequence without blocks those that `match_prefix` just found."""
        assert not sequence.block_table, "the sequence already has blocks"
        sequence.block_table = matched
        sequence.released = self._released_rows(matched)
        for block in self.held(sequence):
            self.pool.share(block)
        sequence.computed = self.rows_of(matched) * self.block_size

    def short(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Those that have no row of their own to write their next position to."""
        count, ref_counts, hashes = self.groups.count, self.pool.ref_counts, self.pool.hashes
        size, several = self.block_size, count > 1
        return [
            sequence
            for sequence in sequences
            if sequence.computed * count >= len(table := sequence.block_table) * size
            or ref_counts[table[-1]] > 1
            or hashes[table[-1]] is not None
            or (several and self._is_shared(table[-count:]))
        ]

    def _is_shared(self, blocks: list[int]) -> bool:
        ref_counts, hashes = self.pool.ref_counts, self.pool.hashes
        return any(ref_counts[block] > 1 or hashes[block] is not None for block in blocks)

    def fit(self, sequence: Sequence, end: int) -> int:
        """The largest end of a run from `computed`, at most `end`, for which there are blocks."""
        free = self.pool.num_free - self._shared_next(sequence)
        if free < 0:
            return sequence.computed
        return min(end, self.reach(sequence, free))

    def reach(self, sequence: Sequence, free: int) -> int:
        """Where the positions end that its blocks and so many more have room for."""
        count = self.groups.count
        return (len(sequence.block_table) // count + free // count) * self.block_size

    def extend(self, sequence: Sequence, end: int, copies: Copies) -> None:
        """Makes positions [computed, end) writable; appends the copies to make before that.

        A block that others share is copied. A cached block with no other user leaves the prefix
        cache instead, as a copy would cost a block and save nothing. No source of a copy is the
        destination of another one, so the copies of a step may run in any order.

        Raises OutOfBlocks where `fit` was not heeded.
        """
        table, pool, count = sequence.block_table, self.pool, self.groups.count
        row = sequence.computed // self.block_size * count
        assert len(table) <= row + count, "the table has blocks beyond its need"
        for index in range(row, len(table)):
            source = table[index]
            if pool.ref_counts[source] > 1:
                table[index] = pool.allocate()
                copies.append((source, table[index]))
                pool.release(source)
            else:
                pool.forget(source)
        for _ in range(self.rows_for(end) * count - len(table)):
            table.append(pool.allocate())

    def fork(self, parent: Sequence, child: Sequence, length: int) -> None:
        """Shares the blocks of the first `length` tokens, which both have and parent has computed.

        A child that knows no more than those is left to compute the last of them itself, for logits
        of its own.
        """
        assert not child.block_table and parent.computed >= length > 0
        child.block_table = parent.block_table[: self.rows_for(length) * self.groups.count]
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
        groups = self.groups
        if groups.window is None:
            return
        first = (sequence.computed - groups.window) // self.block_size
        if first <= sequence.released:
            return
        table, count = sequence.block_table, groups.count
        for row in range(sequence.released, first):
            for block in table[row * count + groups.full : (row + 1) * count]:
                self.pool.release(block)
        for group in range(groups.full, count):
            table[group : first * count : count] = [table[first * count + group]] * first
        sequence.released = first

    def register(self, sequence: Sequence, start: int, end: int) -> None:
        """Puts the blocks that the computed run [start, end) filled into the prefix cache."""
        if not self.prefix_caching:
            return
        count, full = self.groups.count, self.groups.full
        for row in range(start // self.block_size, end // self.block_size):
            key = self.block_hash(sequence, row)
            for group in range(full if row < sequence.released else count):
                block = sequence.block_table[row * count + group]
                self.pool.register(block, key + self._marks[group])

    def truncate(self, sequence: Sequence) -> None:
        """Releases the blocks behind `computed`, which held drafts that were rejected."""
        keep = self.rows_for(sequence.computed) * self.groups.count
        for block in reversed(sequence.block_table[keep:]):
            self.pool.release(block)
        del sequence.block_table[keep:]

    def free(self, sequence: Sequence) -> None:
        """Releases all blocks, last first: the tail of a prefix is evicted before its head."""
        for block in reversed(self.held(sequence)):
            self.pool.release(block)
        sequence.block_table = []
        sequence.computed = sequence.released = 0

    def _share(self, parent: Sequence, child: Sequence) -> None:
        child.released = parent.released
        for block in self.held(child):
            self.pool.share(block)

    def _shared_next(self, sequence: Sequence) -> int:
        """Blocks of the row of the next position that must be copied before it is written."""
        row = sequence.computed // self.block_size * self.groups.count
        ref_counts = self.pool.ref_counts
        return sum(1 for block in sequence.block_table[row:] if ref_counts[block] > 1)

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


def unused_slots(running: Iterable[Sequence], block_size: int, groups: int) -> int:
    """Positions without KV in the blocks of `running`; all are in last rows, shared or not."""
    # Of those that share a last row, all but one are about to leave it.
    unused = {
        table[-1]: len(table) * block_size - sequence.computed * groups
        for sequence in running
        if (table := sequence.block_table)
    }
    return sum(unused.values())
