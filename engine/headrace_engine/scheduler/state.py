"""The requests and sequences of a scheduler, and the phase of each.

It decides nothing: `prefill`, `preemption` and `scheduler` share it and decide what starts, what is
preempted and what a step computes.
"""

from collections.abc import Iterator
from itertools import chain

from ..core.outputs import SequenceOutput
from ..core.request import PENDING, FinishReason, Sequence, State
from ..kv_cache.host_block_tables import HostBlockTables
from ..kv_cache.kv_cache_manager import KVCacheManager
from .lora_queue import LoRAQueue, LoRASlots, SwappedQueue
from .policies import Policy
from .request_queue import Key, LazyHeap, Queue
from .sequence_group import SequenceGroup


class SchedulerState:
    """The state of one scheduler; `slots` is the maximal number of running sequences.

    `decoding`, `prefilling` and `blocked` are the running sequences, each in the order in which
    they came to that phase (a dict is an ordered set with removal in O(1)). Without `host` nothing
    is swapped. `max_loras` is the most different adapters that run at once; None: LoRA is off.
    """

    __slots__ = (
        "aborted_by_policy",
        "blocked",
        "co_scheduled",
        "decoding",
        "groups",
        "host",
        "kv",
        "policy",
        "prefilling",
        "slots",
        "swapped",
        "unfinished",
        "waiting",
    )

    def __init__(
        self,
        policy: Policy,
        kv: KVCacheManager,
        slots: int,
        host: HostBlockTables | None,
        max_loras: int | None = None,
    ) -> None:
        self.policy = policy
        self.kv = kv
        self.slots = slots
        self.host = host
        self.groups: dict[str, SequenceGroup] = {}
        self.waiting: Queue = policy.queue()
        self.swapped: LazyHeap[Key, Sequence] = LazyHeap()
        if max_loras is not None:
            lora_slots = LoRASlots(max_loras, self.running)
            self.waiting = LoRAQueue(self.waiting, lora_slots, patience=slots)
            self.swapped = SwappedQueue(lora_slots)
        self.decoding: dict[Sequence, None] = {}
        self.prefilling: dict[Sequence, None] = {}
        # Beams that wait for the other beams of their search, and sequences that end with the step
        # in flight: they are running, but not part of the next step.
        self.blocked: dict[Sequence, None] = {}
        # Running groups whose sequences must run all at once: each reserves slots for all of them.
        self.co_scheduled: set[SequenceGroup] = set()
        # Last outputs of choices that the policy ended, not yet returned.
        self.aborted_by_policy: list[SequenceOutput] = []
        self.unfinished = 0

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling) + len(self.blocked)

    @property
    def free_slots(self) -> int:
        """The number of further sequences that may start."""
        free = self.slots - self.num_running
        for group in self.co_scheduled:
            free -= group.width - sum(each.state is State.RUNNING for each in group.sequences)
        return free

    def running(self) -> Iterator[Sequence]:
        return chain(self.decoding, self.prefilling, self.blocked)

    def group_of(self, sequence: Sequence) -> SequenceGroup:
        return self.groups[sequence.request.request_id]

    def key(self, sequence: Sequence) -> Key:
        group = self.groups[sequence.request.request_id]
        if self.policy.dynamic:
            return (self.policy.rank(group.request, group.key), sequence.choice)
        return (group.key, sequence.choice)

    def open(self, group: SequenceGroup) -> None:
        """Adds a new request."""
        self.groups[group.request.request_id] = group
        self.unfinished += len(group.sequences)
        self.policy.arrived(group.request)

    def queue_leader(self, group: SequenceGroup) -> None:
        """Queues the choice of a request that computes the prompt for the others."""
        leader = group.next_leader()
        if leader is not None:
            self.waiting.push((group.key, leader.choice), leader)

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence from the running ones and releases its blocks."""
        self.decoding.pop(sequence, None)
        self.prefilling.pop(sequence, None)
        self.blocked.pop(sequence, None)
        self.kv.free(sequence)

    def finish(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Ends a choice. What the step in flight computes for it is dropped."""
        if sequence.token_ids[-1] == PENDING:
            sequence.token_ids.pop()
        if sequence.state is State.RUNNING:
            self.leave(sequence)
        elif sequence.state is State.SWAPPED:
            self._forget_swapped(sequence)
        else:
            self.waiting.discard(sequence)
        sequence.transition(State.FINISHED)
        self.unfinished -= 1
        group.drop(sequence)
        if not group.sequences:
            del self.groups[group.request.request_id]
            self.co_scheduled.discard(group)
            self.policy.gone(group.request)
        elif sequence is group.leader:
            self.queue_leader(group)

    def drop(self, request_id: str) -> None:
        """Ends the remaining choices of a request without output."""
        group = self.groups.get(request_id)
        if group is not None:
            for sequence in group.sequences.copy():
                self.finish(group, sequence)

    def _forget_swapped(self, sequence: Sequence) -> None:
        assert self.host is not None, "a sequence was swapped to nowhere"
        self.swapped.discard(sequence)
        self.host.free(sequence)

    def end(self, group: SequenceGroup, reason: str) -> None:
        """Ends all choices of a request on the policy's behalf; they keep their output."""
        for sequence in group.sequences.copy():
            self.finish(group, sequence)
            self.aborted_by_policy.append(
                SequenceOutput(
                    request_id=sequence.request.request_id,
                    choice=sequence.choice,
                    index=sequence.output_length,
                    token_ids=(),
                    finish_reason=FinishReason.ABORT,
                    cached_tokens=sequence.cached_tokens,
                    reason=reason,
                )
            )
