"""Which running sequences must give way so that one that waits can start. Pure; changes nothing."""

from collections import Counter
from collections.abc import Sequence as Ordered

from .kv_cache import KVCache
from .request import Sequence


def choose_victims(
    outranked: Ordered[Sequence], kv: KVCache, *, blocks: int, slots: int, alone: bool
) -> list[Sequence] | None:
    """The shortest beginning of `outranked` that frees a slot and `blocks`; None where none does.

    `slots` and the pool's free blocks are there already. `alone`: `outranked` are all that run, so
    once they are gone the one that waits has the whole pool. O(their blocks).
    """
    free = kv.pool.num_free
    dropped: Counter[int] = Counter()
    for count, sequence in enumerate(outranked):
        if slots + count > 0 and free >= blocks:
            return list(outranked[:count])
        for block in kv.held(sequence):
            dropped[block] += 1
            free += dropped[block] == kv.pool.ref_counts[block]
    enough = slots + len(outranked) > 0 and (free >= blocks or alone)
    return list(outranked) if enough else None
