"""Preempts running sequences when blocks run out: by a swap, or by recomputing them later.

The earliest running sequence is never preempted for a later one, so at least one always advances.
The policy defines the order.
"""

from collections import Counter
from collections.abc import Sequence as Ordered

from ..core.request import Sequence, State
from ..kv_cache.kv_cache_manager import KVCacheManager
from .sequence_group import SequenceGroup
from .state import SchedulerState
from .swapping import Swapping


class Preemption:
    """Preempts sequences of one scheduler.

    A victim is swapped to host memory if `swapping` finds that cheaper; else its KV is dropped and
    recomputed later. `recomputed` counts the latter since the start.
    """

    def __init__(self, state: SchedulerState, swapping: Swapping | None, watermark: int) -> None:
        self._state = state
        self._swapping = swapping
        self._kv = state.kv
        self._watermark = watermark
        self.recomputed = 0

    def make_room(self, *, preempting: bool = True) -> list[Sequence] | None:
        """Preempts until each decode can have its next row of blocks; returns those that need one.

        Also preempts a later sequence if an earlier prefill has no row to continue with. If a
        preemption is needed and `preempting` is False, returns None and changes nothing.
        """
        kv, state = self._kv, self._state
        needy = kv.needing_rows(state.decoding)
        while (spare := kv.pool.num_free - kv.to_extend(needy)) < 0 or self._prefill_starves(spare):
            if not preempting:
                return None
            self.preempt(max(state.running(), key=state.key))
            needy = kv.needing_rows(state.decoding)
        return needy

    def preempt(self, victim: Sequence) -> None:
        """Takes a sequence's blocks and queues it again at its old place.

        All beams of a request are preempted at once, and recomputed.
        """
        group = self._state.group_of(victim)
        if group.co_scheduled:
            self._preempt_all(group)
            return
        if self._swapping is not None and self._swapping.swap_out(victim):
            return
        self._state.leave(victim)
        victim.transition(State.PREEMPTED)
        self._state.waiting.push(self._state.key(victim), victim)
        self.recomputed += 1

    def _preempt_all(self, group: SequenceGroup) -> None:
        for sequence in group.sequences:
            if sequence.state is State.RUNNING:
                self._state.leave(sequence)
                sequence.transition(State.PREEMPTED)
                self.recomputed += 1
        group.followers[:] = group.sequences
        self._state.co_scheduled.discard(group)
        self._state.queue_leader(group)

    def outranks_any(self, head: Sequence) -> bool:
        """Whether the policy allows `head` to preempt any running sequence."""
        outranks, request = self._state.policy.outranks, head.request
        return any(outranks(request, each.request) for each in self._state.running())

    def victims(self, head: Sequence, blocks: int) -> list[Sequence] | None:
        """The sequences to preempt so that `head` can start with `blocks`, latest first.

        None if preempting all that the policy allows is not enough.
        """
        state = self._state
        outranks, request = state.policy.outranks, head.request
        found = [each for each in state.running() if outranks(request, each.request)]
        if not found:
            return None
        staying = set(state.running()).difference(found)
        blocks += self._watermark + sum(map(self._growth, staying))
        return _choose_victims(
            sorted(found, key=state.key, reverse=True),
            self._kv,
            blocks=blocks,
            slots=state.free_slots - state.group_of(head).width + 1,
            alone=len(found) == state.num_running,
        )

    def _prefill_starves(self, spare: int) -> bool:
        """Whether the first prefill needs more than `spare` blocks, and a later sequence runs."""
        state, groups = self._state, self._kv.groups
        if not state.prefilling or spare >= groups.count + groups.state:
            return False
        first = min(state.prefilling, key=state.key)
        last = max(state.running(), key=state.key)
        group = state.group_of(first)
        if last is first or (group.co_scheduled and last in group.sequences):
            return False
        return spare < self._kv.to_extend(self._kv.needing_rows((first,)))

    def _growth(self, sequence: Sequence) -> int:
        """The number of blocks that the sequence still needs for all its known tokens."""
        least = self._kv.to_extend(self._kv.needing_rows((sequence,)))
        return max(self._kv.growth(sequence), least)


def _choose_victims(
    outranked: Ordered[Sequence], kv: KVCacheManager, *, blocks: int, slots: int, alone: bool
) -> list[Sequence] | None:
    """The fewest sequences, from the front of `outranked`, that free a slot and `blocks`; or None.

    `slots` and the pool's free blocks are available already. `alone` means that no other sequences
    run: without them the waiting one has the whole pool. O(blocks of `outranked`).
    """
    free = kv.pool.num_free
    dropped: Counter[int] = Counter()
    for count, sequence in enumerate(outranked):
        if slots + count > 0 and free >= blocks:
            return list(outranked[:count])
        for block in kv.blocks_of(sequence):
            dropped[block] += 1
            free += dropped[block] == kv.pool.ref_counts[block]
    enough = slots + len(outranked) > 0 and (free >= blocks or alone)
    return list(outranked) if enough else None
