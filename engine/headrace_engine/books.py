"""Which requests and sequences a scheduler has, and in which phase each of them is.

It keeps the sets and nothing else: who starts, who gives way and what a step computes is decided by
`admission`, `pressure` and `scheduler`, which share these books.
"""

from collections.abc import Iterator
from itertools import chain

from .group import Group
from .host_cache import HostCache
from .kv_cache import KVCache
from .lora.turns import AdapterQueue, AdapterTurns, SwappedQueue
from .outputs import SequenceOutput
from .policies import Policy
from .request import PENDING, FinishReason, Sequence, State
from .waiting import Key, LazyHeap, Queue


class Books:
    """Owned by one scheduler; `slots` is the most sequences that run at once.

    `decoding` and `prefilling` are the running sequences, in the order in which they came to that
    phase. A dict is a set that keeps its order and removes in O(1). `host` None swaps nothing.
    `max_loras` is the most different adapters that run at once; None: requests have none.
    """

    __slots__ = (
        "decoding",
        "groups",
        "host",
        "kv",
        "parked",
        "policy",
        "prefilling",
        "shed",
        "slots",
        "swapped",
        "together",
        "unfinished",
        "waiting",
    )

    def __init__(
        self,
        policy: Policy,
        kv: KVCache,
        slots: int,
        host: HostCache | None,
        max_loras: int | None = None,
    ) -> None:
        self.policy = policy
        self.kv = kv
        self.slots = slots
        self.host = host
        self.groups: dict[str, Group] = {}
        self.waiting: Queue = policy.queue()
        self.swapped: LazyHeap[Key, Sequence] = LazyHeap()
        if max_loras is not None:
            turns = AdapterTurns(max_loras, self.running)
            self.waiting = AdapterQueue(self.waiting, turns, patience=slots)
            self.swapped = SwappedQueue(turns)
        self.decoding: dict[Sequence, None] = {}
        self.prefilling: dict[Sequence, None] = {}
        # Beams that wait for the others of their search, and sequences that end with the step in
        # flight: they run, but not in the next step.
        self.parked: dict[Sequence, None] = {}
        # Running groups whose sequences run all at once: each keeps slots for all of them.
        self.together: set[Group] = set()
        # Ends by the policy that nobody was told of yet.
        self.shed: list[SequenceOutput] = []
        self.unfinished = 0

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling) + len(self.parked)

    @property
    def free_slots(self) -> int:
        """How many more sequences may run."""
        free = self.slots - self.num_running
        for group in self.together:
            free -= group.width - sum(each.state is State.RUNNING for each in group.sequences)
        return free

    def running(self) -> Iterator[Sequence]:
        return chain(self.decoding, self.prefilling, self.parked)

    def group_of(self, sequence: Sequence) -> Group:
        return self.groups[sequence.request.request_id]

    def key(self, sequence: Sequence) -> Key:
        group = self.groups[sequence.request.request_id]
        if self.policy.dynamic:
            return (self.policy.rank(group.request, group.key), sequence.choice)
        return (group.key, sequence.choice)

    def open(self, group: Group) -> None:
        """Takes a new request in and queues its leader."""
        self.groups[group.request.request_id] = group
        self.unfinished += len(group.sequences)
        self.policy.arrived(group.request)
        self.queue_leader(group)

    def queue_leader(self, group: Group) -> None:
        leader = group.next_leader()
        if leader is not None:
            self.waiting.push((group.key, leader.choice), leader)

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of the running ones and gives its blocks back."""
        self.decoding.pop(sequence, None)
        self.prefilling.pop(sequence, None)
        self.parked.pop(sequence, None)
        self.kv.free(sequence)

    def finish(self, group: Group, sequence: Sequence) -> None:
        """Ends a choice. What a step in flight still computes for it is dropped."""
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
            self.together.discard(group)
            self.policy.gone(group.request)
        elif sequence is group.leader:
            self.queue_leader(group)

    def drop(self, request_id: str) -> None:
        """Ends what is left of a request without output."""
        group = self.groups.get(request_id)
        if group is not None:
            for sequence in group.sequences.copy():
                self.finish(group, sequence)

    def _forget_swapped(self, sequence: Sequence) -> None:
        assert self.host is not None, "a sequence was swapped to nowhere"
        self.swapped.discard(sequence)
        self.host.free(sequence)

    def end(self, group: Group, reason: str) -> None:
        """Ends all choices of a request because the policy says so; their output stays as it is."""
        for sequence in group.sequences.copy():
            self.finish(group, sequence)
            self.shed.append(
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
