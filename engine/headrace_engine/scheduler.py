"""Iteration-level scheduling: what every step computes, within one budget of tokens.

It decides and keeps the books; it runs no model and reads no clock. Each step the running sequences
that decode come first, then running prefills, then newly admitted ones, a chunk each.

It never deadlocks: a request that cannot fit the whole pool is refused, the earliest running
sequence is never preempted for a later one, and the one that runs alone has the whole pool. Who is
early and who is late is the policy's to say. A step costs O(running), however many wait.
"""

from collections.abc import Iterator
from itertools import chain

from .config import EngineConfig
from .displacement import choose_victims
from .errors import RequestError
from .group import Group, open_group
from .kv_cache import Copies, KVCache
from .outputs import SampledToken, SequenceOutput
from .plan import ScheduledSequence, StepPlan, StepResult
from .policies import Policy
from .request import EngineRequest, FinishReason, Sequence, State
from .stats import SchedulerStats
from .stopping import StopRule
from .validation import Limits, check_request
from .waiting import Key


class Scheduler:
    """Owns all sequences and their blocks. `plan` and `update` alternate; `add` and `abort` may
    come at any time between calls.
    """

    def __init__(self, config: EngineConfig, limits: Limits, policy: Policy) -> None:
        self._limits = limits
        self._policy = policy
        self._token_budget = config.max_num_batched_tokens
        # Each running sequence may ask for a token a step, so none is left out of a step for ever.
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._kv = KVCache(limits.num_blocks, limits.block_size, config.enable_prefix_caching)
        self._watermark = int(config.watermark * limits.num_blocks)
        self._groups: dict[str, Group] = {}
        self._waiting = policy.queue()
        # Running sequences, in the order in which they came to that phase. A dict is a set that
        # keeps its order and removes in O(1).
        self._decoding: dict[Sequence, None] = {}
        self._prefilling: dict[Sequence, None] = {}
        # Ends by the policy that nobody was told of yet.
        self._shed: list[SequenceOutput] = []
        self._arrivals = 0
        self._unfinished = 0
        self._preemptions = 0
        self._prefix_hits = 0
        self._prefix_misses = 0
        self._step_prefill = 0
        self._step_decode = 0

    @property
    def has_work(self) -> bool:
        return bool(self._groups)

    @property
    def kv_cache(self) -> KVCache:
        return self._kv

    def running(self) -> Iterator[Sequence]:
        """The running sequences; they hold all used blocks. Valid until the next call."""
        return chain(self._decoding, self._prefilling)

    def stats(self) -> SchedulerStats:
        pool = self._kv.pool
        running = len(self._decoding) + len(self._prefilling)
        return SchedulerStats(
            running=running,
            waiting=self._unfinished - running,
            swapped=0,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            blocks_free=pool.num_free - pool.num_cached,
            preemptions=self._preemptions,
            prefix_hit_tokens=self._prefix_hits,
            prefix_miss_tokens=self._prefix_misses,
            step_prefill_tokens=self._step_prefill,
            step_decode_tokens=self._step_decode,
        )

    def add(self, request: EngineRequest) -> list[SequenceOutput]:
        """Queues a request. Returns the ends of resumed choices that have nothing left to do.

        Raises RequestError where the request cannot run here, or its id is in use.
        """
        if request.request_id in self._groups:
            raise RequestError(f"request_id {request.request_id!r} is running: choose another")
        check_request(request, self._limits)
        room = self._limits.max_length - len(request.prompt_token_ids)
        rule = StopRule.of(request.params, self._limits.eos_token_ids, room)
        self._arrivals += 1
        group, ended = open_group(request, self._policy.key(request, self._arrivals), rule)
        if group.sequences:
            self._groups[request.request_id] = group
            self._unfinished += len(group.sequences)
            self._policy.arrived(request)
            self._queue_leader(group)
        return ended

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Ends one choice or all of a request without output; an unknown one is no error."""
        group = self._groups.get(request_id)
        if group is None:
            return
        for sequence in group.sequences.copy():
            if choice is None or sequence.choice == choice:
                self._finish(group, sequence)

    def take_shed(self) -> list[SequenceOutput]:
        """The last outputs of choices that the policy ended since this was asked last."""
        shed, self._shed = self._shed, []
        return shed

    def plan(self) -> StepPlan | None:
        """Decides the next step and gives it its blocks; None where nothing is to be done.

        The policy may end requests here: see `take_shed`.
        """
        for request_id, reason in self._policy.expired():
            self._end(self._groups[request_id], reason)
        if self._policy.preempts and self._waiting:
            self._displace()
        needy = self._make_room()
        copies: Copies = []
        for sequence in needy:
            self._kv.extend(sequence, sequence.computed + 1, copies)
        scheduled = [ScheduledSequence(seq, seq.computed, 1, True) for seq in self._decoding]
        decodes = len(scheduled)
        budget = self._token_budget - decodes
        if self._prefilling:
            budget = self._continue_prefills(budget, scheduled, copies)
        if self._waiting:
            budget = self._admit(budget, scheduled, copies)
        if not scheduled:
            return None
        tokens = self._token_budget - budget
        self._step_decode = decodes
        self._step_prefill = tokens - decodes
        return StepPlan(tuple(scheduled), tuple(copies), tokens)

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Books what the step computed. Choices that were aborted meanwhile are passed over."""
        outputs: list[SequenceOutput] = []
        sampled = iter(result.sampled)
        size = self._limits.block_size
        for item in plan.scheduled:
            token = next(sampled) if item.samples else None
            sequence = item.sequence
            if sequence.state is not State.RUNNING:
                continue
            end = sequence.computed = item.start + item.length
            if end % size < item.length:  # the run filled a block
                self._kv.register(sequence, item.start, end)
            group = self._groups[sequence.request.request_id]
            if sequence is group.leader and end >= sequence.prompt_length:
                self._fork_followers(group, sequence)
            if token is not None:
                outputs.append(self._append(group, sequence, token))
            elif item.samples:
                outputs.append(self._break(group, sequence))
        self._policy.stepped(plan)
        return outputs

    def _append(self, group: Group, sequence: Sequence, token: SampledToken) -> SequenceOutput:
        if sequence in self._prefilling:
            del self._prefilling[sequence]
            self._decoding[sequence] = None
        index = sequence.output_length
        sequence.token_ids.append(token.token_id)
        stop = group.rule.check(token.token_id, index + 1)
        if stop is not None:
            self._policy.finished(sequence)
            self._finish(group, sequence)
        return SequenceOutput(
            sequence.request.request_id,
            sequence.choice,
            index,
            (token.token_id,),
            None if token.logprobs is None else (token.logprobs,),
            None if stop is None else stop.reason,
            None if stop is None else stop.token,
            sequence.cached_tokens,
        )

    def _break(self, group: Group, sequence: Sequence) -> SequenceOutput:
        """Ends a choice whose logits were not finite."""
        self._finish(group, sequence)
        return SequenceOutput(
            request_id=sequence.request.request_id,
            choice=sequence.choice,
            index=sequence.output_length,
            token_ids=(),
            finish_reason=FinishReason.ERROR,
        )

    def _end(self, group: Group, reason: str) -> None:
        """Ends all choices of a request because the policy says so; their output stays as it is."""
        for sequence in group.sequences.copy():
            self._finish(group, sequence)
            self._shed.append(
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

    def _finish(self, group: Group, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self._leave(sequence)
        else:
            self._waiting.discard(sequence)
        sequence.transition(State.FINISHED)
        self._unfinished -= 1
        group.drop(sequence)
        if not group.sequences:
            del self._groups[group.request.request_id]
            self._policy.gone(group.request)
        elif sequence is group.leader:
            self._queue_leader(group)

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of the running ones and gives its blocks back."""
        self._decoding.pop(sequence, None)
        self._prefilling.pop(sequence, None)
        self._kv.free(sequence)

    def _queue_leader(self, group: Group) -> None:
        leader = group.next_leader()
        if leader is not None:
            self._waiting.push((group.key, leader.choice), leader)

    def _fork_followers(self, group: Group, leader: Sequence) -> None:
        """Starts the choices that waited for the prompt; those over `max_num_seqs` queue up."""
        room = self._max_running - len(self._decoding) - len(self._prefilling)
        for position, follower in enumerate(group.followers):
            if position >= room:
                self._waiting.push((group.key, follower.choice), follower)
                continue
            self._kv.fork(leader, follower, leader.prompt_length)
            follower.cached_tokens = leader.cached_tokens
            follower.transition(State.RUNNING)
            phase = self._prefilling if follower.output_length else self._decoding
            phase[follower] = None
        group.followers.clear()
        group.leader = None

    def _make_room(self) -> list[Sequence]:
        """Preempts until each decode can have its next block; returns those that need one.

        Also, an earlier prefill that has no block to go on with takes one from a later sequence.
        """
        kv = self._kv
        needy = kv.short(self._decoding)
        while len(needy) > (free := kv.pool.num_free) or (
            free == len(needy) and self._prefill_starves()
        ):
            self._preempt(max(self.running(), key=self._key))
            needy = kv.short(self._decoding)
        return needy

    def _prefill_starves(self) -> bool:
        if not self._prefilling:
            return False
        first = min(self._prefilling, key=self._key)
        return bool(self._kv.short((first,))) and first is not max(self.running(), key=self._key)

    def _preempt(self, victim: Sequence) -> None:
        """Drops a sequence's KV, to be recomputed; its key puts it before all that came later."""
        self._leave(victim)
        victim.transition(State.PREEMPTED)
        self._waiting.push(self._key(victim), victim)
        self._preemptions += 1

    def _key(self, sequence: Sequence) -> Key:
        group = self._groups[sequence.request.request_id]
        if self._policy.dynamic:
            return (self._policy.rank(group.request, group.key), sequence.choice)
        return (group.key, sequence.choice)

    def _displace(self) -> None:
        """Starts what waits first in the place of what it may preempt, as far as the budget goes.

        Comes before the step's decodes are planned, as some of them are what gives way.
        """
        tokens = self._token_budget - len(self._decoding)
        while tokens > 0 and (head := self._waiting.peek()) is not None:
            matched = self._kv.match_prefix(head)
            victims = self._victims(head, self._kv.blocks_to_admit(head, matched))
            if not victims:
                return
            for victim in victims:
                self._preempt(victim)
            first = self._waiting.pop()
            assert first is head, "the policy let a later request preempt an earlier one"
            self._start(head, matched)
            tokens -= len(head.token_ids) - head.computed

    def _victims(self, head: Sequence, blocks: int) -> list[Sequence] | None:
        """What must give way for `head`, latest first; None where that would not be enough."""
        outranks, request = self._policy.outranks, head.request
        found = [each for each in self.running() if outranks(request, each.request)]
        if not found:
            return None
        staying = set(self.running()).difference(found)
        blocks += self._watermark + sum(map(self._growth, staying))
        running = len(self._decoding) + len(self._prefilling)
        return choose_victims(
            sorted(found, key=self._key, reverse=True),
            self._kv.pool,
            blocks=blocks,
            slots=self._max_running - running,
            alone=len(found) == running,
        )

    def _growth(self, sequence: Sequence) -> int:
        """The blocks that it still needs for all tokens it knows."""
        missing = self._kv.blocks_for(len(sequence.token_ids)) - len(sequence.block_table)
        return max(missing, len(self._kv.short((sequence,))))

    def _continue_prefills(
        self, budget: int, scheduled: list[ScheduledSequence], copies: Copies
    ) -> int:
        """A chunk for each running prefill, earliest first. Returns the rest of the budget."""
        for sequence in sorted(self._prefilling, key=self._key):
            if budget == 0:
                break
            budget -= self._schedule_chunk(sequence, budget, scheduled, copies)
        return budget

    def _schedule_chunk(
        self, sequence: Sequence, budget: int, scheduled: list[ScheduledSequence], copies: Copies
    ) -> int:
        """As much of the known tokens as budget and free blocks allow; returns their number."""
        start, known = sequence.computed, len(sequence.token_ids)
        end = self._kv.fit(sequence, min(known, start + budget))
        if end <= start:
            return 0
        self._kv.extend(sequence, end, copies)
        scheduled.append(ScheduledSequence(sequence, start, end - start, end == known))
        return end - start

    def _admit(self, budget: int, scheduled: list[ScheduledSequence], copies: Copies) -> int:
        """Starts waiting sequences in order, until one does not fit. Returns the budget's rest."""
        while budget > 0 and len(self._decoding) + len(self._prefilling) < self._max_running:
            sequence = self._waiting.peek()
            if sequence is None:
                break
            matched = self._kv.match_prefix(sequence)
            if self._refuse(sequence, matched):
                continue
            if not self._has_room(sequence, matched):
                break
            self._waiting.pop()
            self._start(sequence, matched)
            budget -= self._schedule_chunk(sequence, budget, scheduled, copies)
        return budget

    def _refuse(self, sequence: Sequence, matched: list[int]) -> bool:
        """Whether the policy ended the request of a leader: nothing of that has run yet."""
        group = self._groups[sequence.request.request_id]
        if sequence is not group.leader:
            return False
        tokens = len(sequence.token_ids) - len(matched) * self._limits.block_size
        reason = self._policy.refusal(sequence, tokens)
        if reason is not None:
            self._end(group, reason)
        return reason is not None

    def _has_room(self, sequence: Sequence, matched: list[int]) -> bool:
        """Whether all known tokens fit beside the watermark, which one that runs alone may use.

        No running prefill is robbed: budget is left only if each got all its blocks, or none is
        free.
        """
        if not self._decoding and not self._prefilling:
            return True
        needed = self._kv.blocks_to_admit(sequence, matched) + self._watermark
        return needed <= self._kv.pool.num_free

    def _start(self, sequence: Sequence, matched: list[int]) -> None:
        self._kv.start(sequence, matched)
        if sequence.state is State.WAITING:
            hits = sequence.computed
            sequence.cached_tokens = min(hits, sequence.prompt_length)
            self._prefix_hits += hits
            self._prefix_misses += len(sequence.token_ids) - hits
            self._policy.admitted(sequence, len(sequence.token_ids) - hits)
        sequence.transition(State.RUNNING)
        self._prefilling[sequence] = None
