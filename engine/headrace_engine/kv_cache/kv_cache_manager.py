"""Block tables of sequences: prefix match, growth, fork, copy-on-write and release.

It assigns blocks to positions and never touches KV memory: it returns the copies to make as
(source, destination) pairs. It never preempts: its caller checks first what fits.

    block_table   [ b0 ][ b1 ][ b2 ]     position p lies in row p // block_size
    positions     [0, n)                 have their KV; n is the sequence's num_computed_tokens
                  [n, end)               are computed by the scheduled step, in blocks of its own

A row has a block for each group of layers, one after the other: groups that keep all positions
first (see kv_cache_groups). Between steps a table covers `num_computed_tokens` and no row more, so
only blocks of the last row have unused slots.

Blocks of sliding groups that no later position sees are released. Their entries in the table then
repeat a later block of the same group and sequence, which attention may read but always masks.
`Sequence.released` counts these rows.

The recurrent state of a sequence (see state_blocks) is in blocks of the same pool.
"""

from collections.abc import Iterable

from headrace_common.wire.block_hashes import block_hash

from ..core.kv_cache_groups import KVGroups
from ..core.request import Sequence
from .block_pool import BlockPool
from .state_blocks import StateBlocks

Copies = list[tuple[int, int]]


class KVCacheManager:
    """The block tables of one pool. Without `prefix_caching` only forks share blocks.

    `groups` are the groups of the model's layers (None: one group that keeps all positions).
    `max_run` is the most positions of a sequence that a step computes. `state` has the blocks of
    recurrent states; None if the model has none. `registered` collects the hashes of blocks that
    enter the prefix cache, without those of LoRA adapters; None: they are not collected.
    """

    __slots__ = (
        "_marks",
        "block_size",
        "groups",
        "max_run",
        "pool",
        "prefix_caching",
        "registered",
        "state",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        groups: KVGroups | None = None,
        max_run: int = 1,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        size = 0 if groups is None else groups.state
        self.state = StateBlocks(self.pool, size) if size else None
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.groups = groups or KVGroups()
        self.max_run = max_run
        self.registered: list[bytes] | None = None
        # Appended to a row's hash, to tell the groups' blocks apart in the prefix cache.
        self._marks = [bytes((group,)) if group else b"" for group in range(self.groups.count)]

    def rows_for(self, length: int) -> int:
        """Number of block-table rows needed for `length` positions."""
        return -(-length // self.block_size)

    def rows_of(self, table: list[int]) -> int:
        return len(table) // self.groups.count

    def blocks_of(self, sequence: Sequence) -> list[int]:
        """The blocks that the sequence has a reference to, first rows first."""
        table, count, full = sequence.block_table, self.groups.count, self.groups.full
        released = sequence.released * count
        states = [] if self.state is None else self.state.blocks_of(sequence)
        if not released:
            return table + states if states else table
        kept = [table[row + group] for row in range(0, released, count) for group in range(full)]
        return kept + table[released:] + states

    def reuses_prefixes(self, sequence: Sequence) -> bool:
        """Whether the sequence may begin with KV that was computed for another one.

        Requests with prompt_logprobs may not: they need the logits of the whole prompt.
        """
        return self.prefix_caching and sequence.request.params.prompt_logprobs is None

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """The cached blocks of the sequence's first tokens, as a table. Takes no reference.

        It never covers the last known token, since that must be computed for its logits. Sliding
        groups have the blocks that the next position sees. With recurrent layers it ends where a
        snapshot of the state is cached. Valid until a block is allocated.
        """
        if not self.reuses_prefixes(sequence):
            return []
        groups, rows = self.groups, (len(sequence.token_ids) - 1) // self.block_size
        if groups.window is not None and sequence.request.forks:
            # The other sequences begin at the end of the prompt and see the window before it.
            rows = min(rows, sequence.prompt_length // self.block_size)
        if self.state is not None and sequence.request.forks:
            # They begin with the state before the prompt's last token, which is computed first.
            rows = min(rows, (sequence.prompt_length - 2) // self.block_size)
        kept: list[int] = []
        if groups.full:
            kept = self._leading_full(sequence, rows)
            rows = len(kept) // groups.full
        while self.state is not None:
            rows = self._rows_with_state(sequence, rows)
            if groups.window is None:
                return kept[: rows * groups.count]
            table = self._with_sliding(sequence, kept, rows)
            if self.rows_of(table) == rows:
                return table
            rows = self.rows_of(table)
        return kept if groups.window is None else self._with_sliding(sequence, kept, rows)

    def _rows_with_state(self, sequence: Sequence, rows: int) -> int:
        """The most rows, up to `rows`, after which a snapshot of the state is cached."""
        while rows > 0 and not self._cached_state(sequence, rows):
            rows -= 1
        return max(0, rows)

    def _cached_state(self, sequence: Sequence, rows: int) -> list[int]:
        """The snapshot after `rows` rows; empty if none is cached."""
        if self.state is None or not rows:
            return []
        return self.state.lookup(self.block_hash(sequence, rows - 1))

    def _leading_full(self, sequence: Sequence, rows: int) -> list[int]:
        """The cached blocks of groups that keep all positions, in the first `rows` rows.

        Ends before the first row that is not cached completely.
        """
        blocks: list[int] = []
        groups = range(self.groups.full)
        for row in range(rows):
            cached = self._cached(sequence, row, groups)
            if not cached:
                break
            blocks += cached
        return blocks

    def _with_sliding(self, sequence: Sequence, kept: list[int], rows: int) -> list[int]:
        """The longest table, up to `rows` rows, whose last window of sliding blocks is cached.

        `kept` are the cached blocks of the groups that keep all positions.
        """
        sliding, full = range(self.groups.full, self.groups.count), self.groups.full
        seen: list[list[int]] = []
        row = rows - 1
        while row >= self._first_row(rows):
            cached = self._cached(sequence, row, sliding)
            if cached:
                seen.append(cached)
            else:
                seen.clear()
                rows = row
            row -= 1
        seen.reverse()
        first = rows - len(seen)
        table: list[int] = []
        for row in range(rows):
            table += kept[row * full : (row + 1) * full] + seen[max(0, row - first)]
        return table

    def _cached(self, sequence: Sequence, row: int, groups: range) -> list[int]:
        """The blocks of a row for some groups; empty if one of them is not cached."""
        lookup, key = self.pool.lookup, self.block_hash(sequence, row)
        marked = [lookup(key + self._marks[group]) for group in groups]
        found = [block for block in marked if block is not None]
        return found if len(found) == len(groups) else []

    def _first_row(self, rows: int) -> int:
        """The first row in which sliding groups have blocks, in a table of `rows` full rows.

        It has what the last of the table's positions sees: forks compute that one again.
        """
        return self.groups.first_seen(rows * self.block_size - 1) // self.block_size if rows else 0

    def _released_rows(self, matched: list[int]) -> int:
        """Number of first rows of a matched table in which sliding groups have no blocks."""
        return 0 if self.groups.window is None else self._first_row(self.rows_of(matched))

    def blocks_to_start(self, sequence: Sequence, matched: list[int]) -> int:
        """Free blocks needed for all known tokens: new ones, and matched ones that are free."""
        groups, rows = self.groups, self.rows_for(len(sequence.token_ids))
        needed = groups.full * rows - self._in_use(matched, range(groups.full), 0)
        if self.state is not None:
            needed += self.state.to_start(self._cached_state(sequence, self.rows_of(matched)))
        if groups.window is None:
            return needed
        first, sliding = self._released_rows(matched), range(groups.full, groups.count)
        own = groups.sliding * (rows - first) - self._in_use(matched, sliding, first)
        return needed + min(own, groups.sliding * groups.kept(self.block_size, self.max_run))

    def _in_use(self, table: list[int], groups: range, first: int) -> int:
        """Number of used blocks in a table, for some groups and from row `first` on."""
        count, ref_counts = self.groups.count, self.pool.ref_counts
        rows = [table[first * count + group :: count] for group in groups]
        return sum(1 for blocks in rows for block in blocks if ref_counts[block] > 0)

    def growth(self, sequence: Sequence) -> int:
        """Blocks still needed for all known tokens, without copies of shared blocks."""
        groups, rows = self.groups, self.rows_of(sequence.block_table)
        missing = max(0, self.rows_for(len(sequence.token_ids)) - rows)
        state = 0 if self.state is None else self.state.to_write(sequence)
        if groups.window is None:
            return missing * groups.count + state
        room = groups.kept(self.block_size, self.max_run) - (rows - sequence.released)
        return groups.full * missing + groups.sliding * min(missing, max(0, room)) + state

    def start(self, sequence: Sequence, matched: list[int]) -> None:
        """Gives a sequence without blocks those that `match_prefix` has just found."""
        assert not sequence.block_table, "the sequence already has blocks"
        sequence.block_table = matched
        sequence.released = self._released_rows(matched)
        for block in self.blocks_of(sequence):
            self.pool.share(block)
        if self.state is not None:
            self.state.start(sequence, self._cached_state(sequence, self.rows_of(matched)))
        sequence.num_computed_tokens = self.rows_of(matched) * self.block_size

    def needing_rows(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """The sequences that have no unshared row for their next position, or no unshared state."""
        if self.state is not None:
            return [each for each in sequences if self._next_row(each) or self.state.to_write(each)]
        return self._without_row(sequences)

    def to_extend(self, needing: list[Sequence]) -> int:
        """Free blocks that sequences of `needing_rows` need for their next position."""
        if self.state is None:
            return len(needing) * self.groups.count
        return sum(self._next_row(each) + self.state.to_write(each) for each in needing)

    def _next_row(self, sequence: Sequence) -> int:
        return len(self._without_row((sequence,))) * self.groups.count

    def _without_row(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        count, ref_counts, hashes = self.groups.count, self.pool.ref_counts, self.pool.hashes
        size, several = self.block_size, count > 1
        return [
            sequence
            for sequence in sequences
            if sequence.num_computed_tokens * count >= len(table := sequence.block_table) * size
            or ref_counts[table[-1]] > 1
            or hashes[table[-1]] is not None
            or (several and self._is_shared(table[-count:]))
        ]

    def _is_shared(self, blocks: list[int]) -> bool:
        ref_counts, hashes = self.pool.ref_counts, self.pool.hashes
        return any(ref_counts[block] > 1 or hashes[block] is not None for block in blocks)

    def fit(self, sequence: Sequence, end: int) -> int:
        """The largest end, up to `end`, of a run of new positions for which blocks are free."""
        free = self.pool.num_free - self._shared_next(sequence)
        if self.state is not None:
            free -= self.state.to_write(sequence)
        if free < 0:
            return sequence.num_computed_tokens
        return min(end, self.reach(sequence, free))

    def reach(self, sequence: Sequence, free: int) -> int:
        """The end of the positions that the sequence's blocks and `free` more blocks hold."""
        count = self.groups.count
        return (len(sequence.block_table) // count + free // count) * self.block_size

    def extend(self, sequence: Sequence, end: int, copies: Copies) -> None:
        """Makes new positions up to `end`, and the state after them, writable; appends the copies
        to make before that.

        A block that others share is copied. A cached block without other users leaves the prefix
        cache instead: a copy would cost a block and gain nothing. No source of a copy is the
        destination of another one, so the copies of a step may run in any order.

        Raises OutOfBlocks if the caller ignored `fit`.
        """
        table, pool, count = sequence.block_table, self.pool, self.groups.count
        row = sequence.num_computed_tokens // self.block_size * count
        assert len(table) <= row + count, "the table has blocks beyond its need"
        for index in range(row, len(table)):
            source = table[index]
            if pool.ref_counts[source] > 1:
                table[index] = self._allocate()
                copies.append((source, table[index]))
                pool.release(source)
            else:
                pool.forget(source)
        for _ in range(self.rows_for(end) * count - len(table)):
            table.append(self._allocate())
        if self.state is not None:
            self.state.make_writable(sequence)

    def _allocate(self) -> int:
        """Allocates a block for KV."""
        block = self.pool.allocate()
        if self.state is not None:
            self.state.leaves(block)
        return block

    def fork(self, parent: Sequence, child: Sequence, length: int) -> None:
        """Shares the blocks of the first `length` tokens, which both know and the parent computed.

        A child that knows no further tokens computes the last one again, to get its own logits. A
        recurrent state is shared as it is, so then the parent has computed just these tokens, and
        the child knows more.
        """
        assert not child.block_table and parent.num_computed_tokens >= length
        if self.state is not None and length:
            assert parent.num_computed_tokens == length < len(child.token_ids), "no such state"
        child.block_table = parent.block_table[: self.rows_for(length) * self.groups.count]
        self._share(parent, child)
        if self.state is not None and length:
            self.state.share(parent, child)
        child.block_hashes = parent.block_hashes[: length // self.block_size]
        child.num_computed_tokens = min(length, len(child.token_ids) - 1)

    def branch(self, parent: Sequence, child: Sequence) -> None:
        """Shares all blocks of the parent; both know the same computed tokens."""
        assert not child.block_table
        child.block_table = parent.block_table.copy()
        self._share(parent, child)
        if self.state is not None:
            self.state.share(parent, child)
        child.block_hashes = parent.block_hashes[: parent.num_computed_tokens // self.block_size]
        child.num_computed_tokens = parent.num_computed_tokens

    def release_outside_window(self, sequence: Sequence) -> None:
        """Releases the blocks that neither the last computed position nor a later one sees."""
        groups = self.groups
        if groups.window is None:
            return
        first = groups.first_seen(max(0, sequence.num_computed_tokens - 1)) // self.block_size
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
        """Adds the blocks that the run [start, end) fills to the prefix cache, and the snapshots up
        to the computed tokens."""
        if not self.prefix_caching:
            return
        if sequence.snapshots:
            self._keep_snapshots(sequence)
        count, full = self.groups.count, self.groups.full
        for row in range(start // self.block_size, end // self.block_size):
            key, added = self.block_hash(sequence, row), False
            for group in range(full if row < sequence.released else count):
                block = sequence.block_table[row * count + group]
                added |= self.pool.register(block, key + self._marks[group])
            if added and self.registered is not None and sequence.request.lora is None:
                self.registered.append(key)

    def _keep_snapshots(self, sequence: Sequence) -> None:
        assert self.state is not None, "only recurrent states have snapshots"
        end = sequence.num_computed_tokens
        taken = [each for each in sequence.snapshots if each[0] <= end]
        sequence.snapshots = [each for each in sequence.snapshots if each[0] > end]
        for position, blocks in taken:
            self.state.keep(blocks, self.block_hash(sequence, position // self.block_size - 1))

    def truncate(self, sequence: Sequence) -> None:
        """Releases the blocks after the computed tokens, which held rejected drafts."""
        keep = self.rows_for(sequence.num_computed_tokens) * self.groups.count
        for block in reversed(sequence.block_table[keep:]):
            self.pool.release(block)
        del sequence.block_table[keep:]

    def free(self, sequence: Sequence) -> None:
        """Releases all blocks, last first, so that a prefix is evicted from its end."""
        if self.state is not None:
            self.state.free(sequence)
        for block in reversed(self.blocks_of(sequence)):
            self.pool.release(block)
        sequence.block_table = []
        sequence.num_computed_tokens = sequence.released = 0

    def _share(self, parent: Sequence, child: Sequence) -> None:
        child.released = parent.released
        for block in self.blocks_of(child):
            self.pool.share(block)

    def _shared_next(self, sequence: Sequence) -> int:
        """Number of blocks that must be copied before the next position is written."""
        row = sequence.num_computed_tokens // self.block_size * self.groups.count
        ref_counts = self.pool.ref_counts
        return sum(1 for block in sequence.block_table[row:] if ref_counts[block] > 1)

    def block_hash(self, sequence: Sequence, index: int) -> bytes:
        """The hash of the block `index` of the sequence's tokens, which must be full."""
        hashes, images = sequence.block_hashes, sequence.request.images
        spans = [image.span for image in images] if images else ()
        while len(hashes) <= index:
            begin = len(hashes) * self.block_size
            before = hashes[-1] if hashes else sequence.request.prefix_seed
            end = begin + self.block_size
            hashes.append(block_hash(before, sequence.token_ids, spans, begin, end))
        return hashes[index]


def unused_slots(running: Iterable[Sequence], block_size: int, groups: int) -> int:
    """Number of positions without KV in the blocks of `running`; all of them are in last rows."""
    # A shared last row counts once: all but one of its sequences are about to copy it.
    unused = {
        table[-1]: len(table) * block_size - sequence.num_computed_tokens * groups
        for sequence in running
        if (table := sequence.block_table)
    }
    return sum(unused.values())
