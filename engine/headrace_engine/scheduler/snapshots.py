"""Decides where steps copy recurrent states, so that later prompts find them in the prefix cache.

A snapshot takes as much memory as the KV of some thousand tokens, so there cannot be one after
every block. One is taken at the last block border of a prompt, where the next turn of a
conversation begins to differ. Others follow at the distance whose KV takes as much memory as a
snapshot, so that snapshots take at most about as much memory as the KV before them.
"""

from collections.abc import Sequence as Runs

from ..core.step_plan import ScheduledSequence
from ..kv_cache.kv_cache_manager import KVCacheManager
from ..kv_cache.state_blocks import StateBlocks


class SnapshotScheduler:
    """Takes snapshots in the steps of one scheduler, while `watermark` blocks stay free."""

    def __init__(self, kv: KVCacheManager, states: StateBlocks, watermark: int) -> None:
        self._kv = kv
        self._states = states
        self._watermark = watermark
        self._rows = max(1, states.size // kv.groups.count)

    @classmethod
    def of(cls, kv: KVCacheManager, watermark: int) -> "SnapshotScheduler | None":
        """None if there are no states, or no prefix cache."""
        if kv.state is None or not kv.prefix_caching:
            return None
        return cls(kv, kv.state, watermark)

    def take(self, scheduled: Runs[ScheduledSequence]) -> None:
        """Takes the snapshots of a step's runs, if blocks are free.

        Runs with drafts have none, since their states may be rolled back.
        """
        size = self._kv.block_size
        for item in scheduled:
            if item.drafts or (item.start + item.length) // size == item.start // size:
                continue
            for row in self._wanted(item):
                if self._kv.pool.num_free - self._watermark < self._states.size:
                    return
                self._states.take_snapshot(item.sequence, row * size)

    def _wanted(self, item: ScheduledSequence) -> list[int]:
        """The rows after which the run leaves a snapshot."""
        size, every = self._kv.block_size, self._rows
        last = (item.sequence.prompt_length - 1) // size
        first, end = item.start // size + 1, (item.start + item.length) // size
        rows = range(-(-first // every) * every, end + 1, every)
        if not first <= last <= end or last % every == 0:
            return list(rows)
        return sorted([*rows, last])
