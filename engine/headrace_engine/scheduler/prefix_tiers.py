"""Keeps the KV of prefixes in host memory and in the shared tier, and uses it again from there.

    device  --- least recently used blocks --->  host  --- all full blocks --->  shared tier
            <-- at the start of a sequence ----        <-- before it starts ---

Blocks are found by the same hashes in all places. Nothing is copied here: copies between device and
host become part of the next SchedulerOutput, the shared tier reads and writes host blocks.
"""

from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Hashes
from typing import NamedTuple

from ..core.request import Sequence
from ..core.step_cost import PrefillDecodeCosts
from ..kv_cache.host_block_tables import HostBlockTables, Moves
from ..kv_cache.shared_kv_cache import Fetch, SharedKVCache
from .copy_costs import CopyCosts
from .sequence_group import SequenceGroup
from .state import SchedulerState
from .swapping import Swapping

Action = Callable[[], None]


class _Writes(NamedTuple):
    """What follows a scheduled step: (host block, hash) to write, then what to call."""

    blocks: list[tuple[int, bytes]]
    actions: list[Action]


class PrefixTiers:
    """The tiers below the prefix cache of one scheduler. `shared` is None without a shared tier.

    `step_blocks` is the most blocks that a step usually takes. `host_hits` and `shared_hits` count
    tokens of sequences when they start first.
    """

    def __init__(
        self,
        state: SchedulerState,
        swapping: Swapping,
        costs: PrefillDecodeCosts,
        shared: SharedKVCache | None,
        step_blocks: int,
    ) -> None:
        self._state, self._kv = state, state.kv
        self._swapping = swapping
        self._host: HostBlockTables = swapping.host
        self._step_costs = costs
        self.shared = shared
        self._shared_costs = CopyCosts(costs)
        self._step_blocks = max(1, min(step_blocks, self._kv.pool.num_blocks // 4))
        self._until_look = 0  # blocks that the device may take before the next look ahead
        self._worth_saving: bool | None = None  # not decided yet for this step
        # Hashes of blocks that steps before this one have filled, for the shared tier.
        self._filled: list[bytes] = []
        self._to_write: deque[_Writes] = deque()  # of each scheduled step
        self._actions: list[Action] = []  # to call once the blocks filled so far are written
        # The requests that wait for each fetch; none if its time is over.
        self._fetches: dict[Fetch, list[SequenceGroup]] = {}
        self._writing: Counter[int] = Counter()  # host blocks that are being written
        self._fetched: dict[int, bytes] = {}  # host blocks that came from the shared tier
        self.host_hits = 0
        self.shared_hits = 0
        self._kv.pool.on_evicted = self._on_evicted
        if shared is not None:
            self._kv.registered = []

    @property
    def has_saves(self) -> bool:
        """Whether blocks are to be copied for the shared tier, even if nothing runs."""
        return bool(self._filled or self._kv.registered or self._actions)

    @property
    def fetching(self) -> bool:
        """Whether requests wait for KV from the shared tier."""
        return any(self._fetches.values())

    def wait(self, seconds: float) -> None:
        """Waits until KV has come from the shared tier, at most `seconds`."""
        if self.shared is not None:
            self.shared.wait(seconds)

    @property
    def held_blocks(self) -> list[int]:
        """The host blocks that are being written to the shared tier or read from it."""
        reading = [block for fetch in self._fetches for block in fetch.blocks]
        to_write = [block for step in self._to_write for block, _ in step.blocks]
        return [*reading, *to_write, *self._writing.elements()]

    def begin_step(self) -> None:
        """Takes over what the shared tier has read and written, before a step is scheduled."""
        self._worth_saving = None
        if self.shared is None or self._kv.registered is None:
            return
        self._filled += self._kv.registered
        self._kv.registered.clear()
        for block in self.shared.take_written():
            self._writing[block] -= 1
            self._host.pool.release(block)
        for fetch in list(self._fetches):
            self._proceed(self.shared, fetch)

    # Device and host

    def tokens_on_host(self, sequence: Sequence, rows: int) -> int:
        """The number of tokens after the first `rows` rows whose KV is in host memory."""
        return len(self._host.matching(sequence, rows)) * self._kv.block_size

    def load(self, sequence: Sequence, *, counted: bool) -> None:
        """Gives a sequence that starts the blocks in host memory that follow its own ones, if that
        is cheaper than computing them."""
        found = self._host.matching(sequence, self._kv.rows_of(sequence.block_table))
        found = found[: self._kv.pool.num_free]
        size = self._kv.block_size
        if not found or not self._swapping.costs.load_is_cheaper(len(found), len(found) * size):
            return
        if counted:
            pool = self._host.pool
            shared = sum(self._fetched.pop(host, None) == pool.hashes[host] for host in found)
            self.shared_hits += shared * size
            self.host_hits += (len(found) - shared) * size
        self._host.load(sequence, found, self._swapping.ins)

    def _on_evicted(self, block: int, block_hash: bytes) -> None:
        """Saves a block before the scheduled step writes it."""
        self._until_look -= 1
        if self._is_worth_saving():
            host = self._host.save(block_hash)
            if host is not None:
                self._swapping.outs.append((block, host))

    def _is_worth_saving(self) -> bool:
        if self._worth_saving is None:
            size = self._kv.block_size
            self._worth_saving = self._swapping.costs.load_is_cheaper(1, size)
        return self._worth_saving

    def take_saves(self) -> tuple[tuple[int, int], ...]:
        """The copies to host memory that the scheduled step makes while it computes."""
        saves: Moves = []
        if self.shared is not None:
            actions, self._actions = self._actions, []
            self._to_write.append(_Writes(self._save_filled(self.shared, saves), actions))
        self._save_ahead(saves)
        return tuple(saves)

    def _save_ahead(self, saves: Moves) -> None:
        """Saves the blocks that the next steps may evict, so that they need not wait for it."""
        if self._until_look > 0 or not self._is_worth_saving():
            return
        pool = self._kv.pool
        for block in pool.first_free(2 * self._step_blocks):
            block_hash = pool.hashes[block]
            host = None if block_hash is None else self._host.save(block_hash)
            if host is not None:
                saves.append((block, host))
        self._until_look = self._step_blocks

    def _save_filled(self, shared: SharedKVCache, saves: Moves) -> list[tuple[int, bytes]]:
        """Saves the filled blocks that the shared tier does not have; returns what to write there.

        Blocks that the scheduled step itself computes are saved in the next one.
        """
        writing: list[tuple[int, bytes]] = []
        filled, self._filled = self._filled, []
        if not filled:
            return writing
        present, room = set(self._kv.registered or ()), shared.room()
        for block_hash in filled:
            if shared.knows(block_hash) or block_hash in present:
                continue
            if len(writing) >= room:
                shared.skip(1)
                continue
            present.add(block_hash)
            host = self._host.pool.lookup(block_hash)
            block = self._kv.pool.lookup(block_hash)
            if host is None and block is not None:
                host = self._host.save(block_hash)
                if host is not None:
                    saves.append((block, host))
            if host is not None:
                self._host.pool.share(host)
                writing.append((host, block_hash))
        return writing

    # The shared tier

    def update(self) -> None:
        """Takes over that the earliest step that is scheduled has ended."""
        if self.shared is None:
            return
        self.shared.set_idle(not self._state.groups)
        writes = self._to_write.popleft()
        for block, block_hash in writes.blocks:
            if self.shared.write(block, block_hash):
                self._writing[block] += 1
            else:
                self._host.pool.release(block)
        for action in writes.actions:
            self.shared.call_after_writes(action)

    def call_when_shared(self, action: Action) -> None:
        """Has `action` called, in any thread, when the shared tier has the blocks that are full
        now, as far as it could take them. Needs a shared tier."""
        assert self.shared is not None
        self._actions.append(action)

    def hold(self, group: SequenceGroup) -> bool:
        """Whether a request waits for KV from the shared tier; then it is queued later."""
        shared = self.shared
        if shared is None:
            return False
        shared.set_idle(False)
        missing = self._missing(group.followers[0])
        if not missing:
            return False
        for fetch, groups in self._fetches.items():
            if groups and fetch.hashes[0] == missing[0]:
                groups.append(group)
                return True
        tokens = len(missing) * self._kv.block_size
        if not self._shared_costs.load_is_cheaper(len(missing), tokens):
            return False
        fetch = shared.find(missing, self._step_costs.prompt(tokens))
        self._fetches[fetch] = [group]
        return True

    def _missing(self, sequence: Sequence) -> Hashes[bytes]:
        """The hashes of the sequence's blocks after those on the device and the host."""
        if sequence.request.lora is not None or not self._kv.reuses_prefixes(sequence):
            return ()
        rows = (len(sequence.token_ids) - 1) // self._kv.block_size
        hashes = [self._kv.block_hash(sequence, row) for row in range(rows)]
        device, host = self._kv.pool.lookup, self._host.pool.lookup
        for row, block_hash in enumerate(hashes):
            if device(block_hash) is None and host(block_hash) is None:
                return hashes[row:]
        return ()

    def _proceed(self, shared: SharedKVCache, fetch: Fetch) -> None:
        """Gives a fetch what it waits for, and starts its requests when it has ended or is late."""
        pool = self._host.pool
        if fetch.read is not None:
            self._take_read(fetch)
        elif fetch.found is not None and not fetch.blocks:
            count = min(fetch.found, pool.num_free)
            if count and not shared.is_late(fetch):
                shared.read(fetch, [pool.allocate() for _ in range(count)])
            else:
                self._queue(self._fetches.pop(fetch))
        elif self._fetches[fetch] and shared.is_late(fetch):
            # A store that hangs counts as expensive, so that others do not wait for it as well.
            self._shared_costs.observe(len(fetch.hashes), shared.waited(fetch))
            groups, self._fetches[fetch] = self._fetches[fetch], []
            self._queue(groups)

    def _take_read(self, fetch: Fetch) -> None:
        assert fetch.read is not None
        pool, read = self._host.pool, fetch.read
        for block, block_hash in zip(fetch.blocks[:read], fetch.hashes, strict=False):
            pool.register(block, block_hash)
            self._fetched[block] = block_hash
        for block in reversed(fetch.blocks):
            pool.release(block)
        if read:
            self._shared_costs.observe(read, fetch.seconds)
        groups = self._fetches.pop(fetch)
        self._queue(groups[:1])
        for group in groups[1:]:  # their prompts may go on with other tokens
            if self._is_held(group) and not self.hold(group):
                self._state.queue_leader(group)

    def _queue(self, groups: list[SequenceGroup]) -> None:
        for group in groups:
            if self._is_held(group):
                self._state.queue_leader(group)

    def _is_held(self, group: SequenceGroup) -> bool:
        """Whether the request has not ended while it waited."""
        return self._state.groups.get(group.request.request_id) is group and bool(group.followers)
