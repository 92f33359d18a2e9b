"""Schedules drafts of speculative decoding, as far as budget and free blocks are left."""

from ..core.step_plan import Drafts, ScheduledSequence
from ..kv_cache.kv_cache_manager import Copies, KVCacheManager


class DraftScheduler:
    """Adds drafts to the steps of one scheduler. Drafts leave `watermark` blocks free."""

    def __init__(self, kv: KVCacheManager, watermark: int) -> None:
        self._kv = kv
        self._watermark = watermark

    def add(
        self,
        drafts: Drafts,
        scheduled: list[ScheduledSequence],
        decodes: int,
        budget: int,
        copies: Copies,
    ) -> int:
        """Adds drafts to the first `decodes` entries of `scheduled`; returns the number of drafts.

        Entries with drafts are moved after those without.
        """
        plain: list[ScheduledSequence] = []
        drafted: list[ScheduledSequence] = []
        rest = budget
        for item in scheduled[:decodes]:
            sequence = item.sequence
            tokens = drafts.get(sequence, ())[:rest]
            spare = max(0, self._kv.pool.num_free - self._watermark - self._kv.groups.state)
            tokens = tokens[: self._kv.reach(sequence, spare) - item.start - 1]
            # If this step reads a state from other blocks, that state cannot be saved in addition.
            if not tokens or sequence.state_source or not self._can_save():
                plain.append(item)
                continue
            self._kv.extend(sequence, item.start + 1 + len(tokens), copies)
            if self._kv.state is not None:
                self._kv.state.save(sequence)
            drafted.append(item._replace(drafts=tokens))
            rest -= len(tokens)
        scheduled[:decodes] = plain + drafted
        return budget - rest

    def _can_save(self) -> bool:
        """Whether the state before drafts can be kept beside the one after them."""
        return self._kv.pool.num_free - self._watermark >= self._kv.groups.state
