"""Which drafts of speculative decoding a step runs: what budget and free blocks are left for."""

from .kv_cache import Copies, KVCache
from .plan import Drafts, ScheduledSequence


class Drafting:
    """For one scheduler. Drafts take free blocks only, and not those below the watermark."""

    def __init__(self, kv: KVCache, watermark: int) -> None:
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
        """Puts drafts behind the first `decodes` of `scheduled`, which come after those without;
        returns their number."""
        plain: list[ScheduledSequence] = []
        drafted: list[ScheduledSequence] = []
        rest = budget
        for item in scheduled[:decodes]:
            sequence = item.sequence
            tokens = drafts.get(sequence, ())[:rest]
            spare = max(0, self._kv.pool.num_free - self._watermark)
            tokens = tokens[: self._kv.reach(sequence, spare) - item.start - 1]
            if not tokens:
                plain.append(item)
                continue
            self._kv.extend(sequence, item.start + 1 + len(tokens), copies)
            drafted.append(item._replace(drafts=tokens))
            rest -= len(tokens)
        scheduled[:decodes] = plain + drafted
        return budget - rest
