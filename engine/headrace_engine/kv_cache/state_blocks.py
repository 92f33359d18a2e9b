"""The blocks of recurrent states: of running sequences, and snapshots in the prefix cache.

A state is `size` blocks of the pool that also holds KV; the runner lays the states of all recurrent
layers out over them. They are shared, cached and evicted together. A step reads a state from one
list of blocks and writes the state after its run to another one or to the same, so copy-on-write
copies nothing.

    sequence        [ state ]------ step ------>[ state ]     in place, if no other sequence or
                        |                           |         snapshot has these blocks
                        +-- read by others          +--> [ snapshot ] at block borders

Only the first block of a snapshot has a key by content. Its other blocks have hashes of their own,
so that they stay in the order of eviction; the first one is evicted first.
"""

from ..core.request import Sequence
from .block_pool import BlockPool

# Appended to the hash of the tokens, to tell a snapshot from the KV of the last block.
MARK = b"state"


class StateBlocks:
    """The states in one pool, each in `size` blocks."""

    __slots__ = ("_counted", "_held", "_pool", "_snapshots", "_unsettled", "size", "zeroed")

    def __init__(self, pool: BlockPool, size: int) -> None:
        self._pool = pool
        self.size = size
        # The blocks of a snapshot by its first block. Stale once that block has no key.
        self._snapshots: dict[int, list[int]] = {}
        self._counted = 0
        # Whether the block was last used for a state.
        self._held = bytearray(pool.num_blocks)
        # Blocks that get KV in the scheduled step and held a state before.
        self.zeroed: list[int] = []
        # States that the scheduled step reads and nothing needs after it.
        self._unsettled: list[tuple[Sequence, list[int]]] = []

    @property
    def unsettled(self) -> list[int]:
        """The blocks that only the scheduled step reads."""
        return [block for _, blocks in self._unsettled for block in blocks]

    def blocks_of(self, sequence: Sequence) -> list[int]:
        """The blocks that the sequence has a reference to."""
        blocks = sequence.state_blocks + sequence.saved_state
        for _, snapshot in sequence.snapshots:
            blocks += snapshot
        return blocks

    def lookup(self, prefix: bytes) -> list[int]:
        """The snapshot after the tokens whose hash is `prefix`; empty if none is cached."""
        first = self._pool.lookup(prefix + MARK)
        return [] if first is None else self._snapshots[first]

    def to_start(self, snapshot: list[int]) -> int:
        """Free blocks that a sequence needs to start: its own, and those of an unused snapshot."""
        unused = bool(snapshot) and not self._pool.ref_counts[snapshot[0]]
        return self.size * (2 if unused else 1)

    def to_write(self, sequence: Sequence) -> int:
        """Free blocks that the state after the next position needs."""
        blocks = sequence.state_blocks
        shared = not blocks or self._pool.ref_counts[blocks[0]] > 1
        return self.size if shared else 0

    def start(self, sequence: Sequence, snapshot: list[int]) -> None:
        """Gives the sequence the state of a snapshot, or none."""
        sequence.state_blocks = snapshot
        self._share(snapshot)

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Gives a child the state of its parent."""
        child.state_blocks = parent.state_blocks
        self._share(child.state_blocks)

    def make_writable(self, sequence: Sequence) -> None:
        """Gives the step blocks for the state after its run.

        A snapshot stays cached if there are blocks for a state beside it, else the sequence
        overwrites it. Blocks of shared states are not reused before the step has read them.
        """
        pool, blocks = self._pool, sequence.state_blocks
        if sequence.state_source:
            return
        if blocks and pool.ref_counts[blocks[0]] == 1:
            if pool.hashes[blocks[0]] is None:
                return
            if pool.num_free < self.size:
                for block in blocks:
                    pool.forget(block)
                return
        sequence.state_blocks = self._allocate()
        if blocks:
            sequence.state_source = blocks
            self._unsettled.append((sequence, blocks))

    def save(self, sequence: Sequence) -> None:
        """Keeps the state before drafts, which the step must not overwrite."""
        assert not sequence.state_source and not sequence.saved_state
        sequence.saved_state = sequence.state_source = sequence.state_blocks
        sequence.state_blocks = self._allocate()

    def verified(self, sequence: Sequence, *, accepted: bool) -> None:
        """Keeps the state after the drafts if all were `accepted`, else the one before them."""
        dropped = sequence.saved_state
        if not accepted:
            dropped, sequence.state_blocks = sequence.state_blocks, dropped
        self._release(dropped)
        sequence.saved_state, sequence.state_source = [], []

    def take_snapshot(self, sequence: Sequence, position: int) -> None:
        """Makes the scheduled step copy the state after `position` tokens to other blocks."""
        sequence.snapshots = [*sequence.snapshots, (position, self._allocate())]

    def keep(self, blocks: list[int], prefix: bytes) -> None:
        """Releases a snapshot.

        Adds it to the prefix cache first, unless the cache has one for the same tokens.
        """
        pool, first = self._pool, blocks[0]
        if pool.lookup(prefix + MARK) is None:
            pool.register(first, prefix + MARK)
            self._snapshots[first] = blocks
            for block in blocks[1:]:
                self._counted += 1
                pool.register(block, MARK + self._counted.to_bytes(8, "big"))
        self._release(blocks)

    def free(self, sequence: Sequence) -> None:
        """Releases all blocks of the sequence."""
        self._release(sequence.state_blocks)
        self._release(sequence.saved_state)
        for _, blocks in sequence.snapshots:
            self._release(blocks)
        sequence.state_blocks, sequence.saved_state, sequence.state_source = [], [], []
        sequence.snapshots = []

    def settle(self) -> None:
        """Releases the states that only the step before has read."""
        for sequence, blocks in self._unsettled:
            self._release(blocks)
            if sequence.state_source is blocks:
                sequence.state_source = []
        self._unsettled.clear()

    def leaves(self, block: int) -> None:
        """Records that a newly allocated block gets KV."""
        if self._held[block]:
            self._held[block] = 0
            self.zeroed.append(block)

    def take_zeroed(self) -> tuple[int, ...]:
        """The blocks to zero in the step that is scheduled now."""
        zeroed = tuple(self.zeroed)
        self.zeroed.clear()
        return zeroed

    def _allocate(self) -> list[int]:
        blocks = [self._pool.allocate() for _ in range(self.size)]
        for block in blocks:
            self._held[block] = 1
        return blocks

    def _share(self, blocks: list[int]) -> None:
        for block in blocks:
            self._pool.share(block)

    def _release(self, blocks: list[int]) -> None:
        for block in blocks:
            self._pool.release(block)
