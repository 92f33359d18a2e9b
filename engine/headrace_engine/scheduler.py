"""Iteration-level scheduling: what every step computes, within one budget of tokens.

It decides and keeps the books; it runs no model and reads no clock. Each step the running sequences
that decode come first, then running prefills, then newly admitted ones, a chunk each.

It never deadlocks: a request that cannot fit the whole pool is refused, the earliest running
sequence is never preempted for a later one, and the one that runs alone has the whole pool. Who is
early and who is late is the policy's to say. A step costs O(running), however many wait.
"""

from collections.abc import Iterator
from dataclasses import replace

from .admission import Admission
from .books import Books
from .config import EngineConfig
from .drafting import Drafting
from .errors import RequestError
from .group import Group, open_group
from .held import HeldRequests
from .host_cache import HostCache
from .kv_cache import Copies, KVCache, unused_slots
from .lookahead import advance
from .lora.use import AdapterUse, adapter_use
from .outputs import SampledToken, SequenceOutput, TokenLogprobs
from .pacing import Pacing
from .phase_costs import PhaseCosts
from .plan import NO_DRAFTS, Drafts, ScheduledSequence, StepPlan, StepResult
from .policies import Policy
from .pressure import MemoryPressure
from .request import PENDING, EngineRequest, FinishReason, Sequence, SequenceView, State
from .stats import SchedulerStats
from .stopping import StopRule
from .swapping import Swapping
from .validation import Limits, check_request

NO_MOVES: tuple[tuple[()], tuple[()]] = ((), ())


class Scheduler:
    """Owns all sequences and their blocks. `plan` and `update` alternate, but for one more `plan`
    after an `advance`; `add` and `abort` may come at any time between calls.
    """

    def __init__(self, config: EngineConfig, limits: Limits, policy: Policy) -> None:
        self._limits = limits
        self._policy = policy
        self._token_budget = config.max_num_batched_tokens
        # Each running sequence may ask for a token a step, so none is left out of a step for ever.
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._kv = KVCache(
            limits.num_blocks,
            limits.block_size,
            config.enable_prefix_caching,
            limits.kv_groups,
            config.max_num_batched_tokens,
        )
        self._watermark = int(config.watermark * limits.num_blocks)
        assert limits.kv_groups.count == 1 or not limits.num_host_blocks, "groups are not swapped"
        host = HostCache(limits.num_host_blocks, self._kv) if limits.num_host_blocks else None
        self._max_loras = config.max_loras if config.enable_lora else None
        self._books = Books(policy, self._kv, self._max_running, host, self._max_loras)
        self._costs = PhaseCosts()
        self._swapping = None if host is None else Swapping(self._books, host, self._costs)
        self._pressure = MemoryPressure(self._books, self._swapping, self._watermark)
        self._admission = Admission(
            self._books,
            self._pressure,
            self._swapping,
            self._watermark,
            whole_prompts=limits.pooler is not None and limits.pooler.bidirectional,
        )
        self._held = HeldRequests(self._books, limits)
        self._pacing = Pacing(config.itl_target, self._costs)
        self._drafting = Drafting(self._kv, self._watermark)
        self._arrivals = 0
        self._step_prefill = 0
        self._step_decode = 0

    @property
    def has_work(self) -> bool:
        return bool(self._books.groups)

    @property
    def kv_cache(self) -> KVCache:
        return self._kv

    @property
    def host_cache(self) -> HostCache | None:
        """The blocks of swapped sequences; None without swap space."""
        return self._books.host

    def sequences(self) -> dict[str, tuple[SequenceView, ...]]:
        """The unfinished sequences by request. Any thread may ask."""
        return {
            group.request.request_id: tuple(map(SequenceView.of, list(group.sequences)))
            for group in list(self._books.groups.values())
        }

    def adapters(self) -> AdapterUse | None:
        """Which LoRA adapters are in use; None without them. Any thread may ask."""
        if self._max_loras is None:
            return None
        return adapter_use(self._max_loras, list(self._books.groups.values()))

    def running(self) -> Iterator[Sequence]:
        """The running sequences; they hold all used blocks. Valid until the next call."""
        return self._books.running()

    def swapped(self) -> Iterator[Sequence]:
        """The sequences in host memory, in no order."""
        return iter(self._books.swapped)

    def stats(self) -> SchedulerStats:
        pool, books, swapping = self._kv.pool, self._books, self._swapping
        running, swapped = books.num_running, len(books.swapped)
        unused = unused_slots(books.running(), self._limits.block_size, self._kv.groups.count)
        block_bytes = self._limits.bytes_per_block
        return SchedulerStats(
            running=running,
            waiting=books.unfinished - running - swapped,
            swapped=swapped,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            blocks_free=pool.num_free - pool.num_cached,
            preemptions=self._pressure.recomputed,
            prefix_hit_tokens=self._admission.prefix_hits,
            prefix_miss_tokens=self._admission.prefix_misses,
            step_prefill_tokens=self._step_prefill,
            step_decode_tokens=self._step_decode,
            swaps=0 if swapping is None else swapping.swapped_out,
            swap_out_bytes=0 if swapping is None else swapping.blocks_out * block_bytes,
            swap_in_bytes=0 if swapping is None else swapping.blocks_in * block_bytes,
            host_blocks_used=0 if swapping is None else swapping.host.pool.num_used,
            host_blocks_free=0 if swapping is None else swapping.host.pool.num_free,
            kv_slots_used=pool.num_used * self._limits.block_size - unused,
            kv_slots_unused=unused,
        )

    def add(self, request: EngineRequest) -> list[SequenceOutput]:
        """Queues a request. Returns the ends of resumed choices that have nothing left to do.

        Raises RequestError where the request cannot run here, or its id is in use.
        """
        if request.request_id in self._books.groups:
            raise RequestError(f"request_id {request.request_id!r} is running: choose another")
        check_request(request, self._limits)
        room = self._limits.max_length - len(request.prompt_token_ids)
        rule = StopRule.of(request.params, self._limits.eos_token_ids, room)
        self._arrivals += 1
        key = self._policy.key(request, self._arrivals)
        if request.params.answers_at_end:
            self._books.open(self._held.open(request, key, rule))
            return []
        group, ended = open_group(request, key, rule)
        if group.sequences:
            self._books.open(group)
        return ended

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Ends one choice or all of a request without output; an unknown one is no error."""
        if choice is not None and request_id in self._held:
            if not self._held.mute(request_id, choice):
                return
            choice = None
        self._held.forget(request_id)
        group = self._books.groups.get(request_id)
        if group is None:
            return
        for sequence in group.sequences.copy():
            if choice is None or sequence.choice == choice:
                self._books.finish(group, sequence)

    def take_shed(self) -> list[SequenceOutput]:
        """The last outputs of choices that the policy ended since this was asked last."""
        shed, self._books.shed = self._books.shed, []
        return self._held.sift(shed) if shed else shed

    def draftable(self) -> list[tuple[Sequence, int]]:
        """The decoding sequences and how many drafts each can use before its output is full."""
        groups = self._books.groups
        return [
            (seq, groups[seq.request.request_id].rule.max_output - seq.output_length - 1)
            for seq in self._books.decoding
            if seq.request.candidates is None  # a beam's next token is its search's to choose
        ]

    def advance(self, plan: StepPlan) -> bool:
        """Books a submitted step as done, but for its tokens; whether `plan` may look ahead now.

        Comes after the update of the step before and before any other plan. Where it is false, the
        step's own update must come first.
        """
        return advance(self._books, plan)

    def plan(self, drafts: Drafts = NO_DRAFTS, *, ahead: bool = False) -> StepPlan | None:
        """Decides the next step and gives it its blocks; None where nothing is to be done.

        `drafts` are run as far as budget and free blocks go once all else has its share.
        The policy may end requests here: see `take_shed`. `ahead`: while the step that was booked
        by `advance` is in flight; None also where something must give way, which then has to wait.
        """
        books, swapping = self._books, self._swapping
        needy = self._make_way(ahead)
        if needy is None:
            return None
        copies: Copies = []
        for sequence in needy:
            self._kv.extend(sequence, sequence.computed + 1, copies)
        scheduled = [ScheduledSequence(seq, seq.computed, 1, True) for seq in books.decoding]
        decodes = len(scheduled)
        budget = room = self._pacing.prompt_tokens(self._token_budget - decodes, decodes)
        if books.prefilling:
            budget = self._admission.continue_prefills(budget, scheduled, copies)
        if books.waiting or books.swapped:
            budget = self._admission.admit(budget, scheduled, copies)
        if not scheduled:
            return None
        prefill = room - budget
        tokens = decodes + prefill
        if drafts and (rest := self._token_budget - tokens):
            tokens += self._drafting.add(drafts, scheduled, decodes, rest, copies)
        moves = NO_MOVES if swapping is None else swapping.take()
        return StepPlan(tuple(scheduled), tuple(copies), tokens, *moves, prefill, ahead)

    def _make_way(self, ahead: bool) -> list[Sequence] | None:
        """What must end or give way before a step; the decodes that need a block, or None where
        a step in flight has to be waited for."""
        books, policy = self._books, self._policy
        if self._swapping is not None:
            self._swapping.host.settle()
        for request_id, reason in policy.expired():
            books.end(books.groups[request_id], reason)
        if policy.preempts and (books.waiting or books.swapped):
            if ahead and self._admission.wants_displacing():
                return None
            self._admission.displace(self._token_budget - len(books.decoding))
        return self._pressure.make_room(preempting=not ahead)

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Books what the step computed. Choices that were aborted meanwhile are passed over."""
        if result.embeddings:
            return self._update_embeddings(plan, result.embeddings)
        self._learn(plan, result)
        self._score(plan, result)
        outputs: list[SequenceOutput] = []
        sampled = iter(result.sampled)
        size, groups = self._limits.block_size, self._books.groups
        slides = self._kv.groups.window is not None
        for sequence, start, length, samples, drafts, _ in plan.scheduled:
            tokens = next(sampled) if samples else None
            if sequence.state is not State.RUNNING:
                continue
            group = groups[sequence.request.request_id]
            if drafts and tokens is not None:
                tokens = self._accept(group, sequence, tokens)
                length += len(tokens) - 1
            end = sequence.computed = start + length
            if end % size < length:  # the run filled a block
                self._kv.register(sequence, start, end)
            if drafts:
                self._kv.truncate(sequence)
            if sequence is group.leader and end >= sequence.prompt_length:
                self._fork_followers(group, sequence)
            if slides:  # after the fork: followers may see what the leader does not
                self._kv.slide(sequence)
            if samples:
                outputs.append(
                    self._break(group, sequence)
                    if tokens is None
                    else self._append(group, sequence, tokens)
                )
        self._policy.stepped(plan)
        return self._held.sift(outputs)

    def _learn(self, plan: StepPlan, result: StepResult) -> None:
        """What the step was and cost."""
        self._step_prefill = plan.prefill_tokens
        self._step_decode = plan.num_tokens - plan.prefill_tokens
        computing = result.seconds - result.swap_seconds
        self._costs.observe(self._step_decode, self._step_prefill, computing)
        if self._swapping is not None:
            self._swapping.observe(plan, result)

    def _score(self, plan: StepPlan, result: StepResult) -> None:
        """Keeps log probabilities of prompts until the first output of their requests."""
        if not result.scored:
            return
        runs = [item for item in plan.scheduled if item.scores]
        for run, found in zip(runs, result.scored, strict=True):
            group = self._books.groups.get(run.sequence.request.request_id)
            if group is not None:
                group.score(run.start, found)

    def _update_embeddings(
        self, plan: StepPlan, embeddings: tuple[bytes | None, ...]
    ) -> list[SequenceOutput]:
        """As update: whose prompt ended in this step has its embedding and is done."""
        ending = [item.sequence for item in plan.scheduled if item.samples]
        prefills = tuple(item._replace(samples=False) for item in plan.scheduled)
        self.update(replace(plan, scheduled=prefills), StepResult(()))
        return [
            self._embed(sequence, embedding)
            for sequence, embedding in zip(ending, embeddings, strict=True)
            if sequence.state is State.RUNNING
        ]

    def _embed(self, sequence: Sequence, embedding: bytes | None) -> SequenceOutput:
        group = self._books.groups[sequence.request.request_id]
        if embedding is None:
            return self._break(group, sequence)
        self._policy.finished(sequence)
        self._books.finish(group, sequence)
        return SequenceOutput(
            request_id=sequence.request.request_id,
            choice=sequence.choice,
            index=0,
            token_ids=(),
            finish_reason=FinishReason.STOP,
            cached_tokens=sequence.cached_tokens,
            embedding=embedding,
        )

    def _accept(
        self, group: Group, sequence: Sequence, tokens: tuple[SampledToken, ...]
    ) -> tuple[SampledToken, ...]:
        """Makes accepted drafts known tokens; the tokens up to the first that ends the output."""
        tokens = group.rule.cut(tokens, sequence.output_length)
        sequence.token_ids.extend(token.token_id for token in tokens[:-1])
        return tokens

    def _append(
        self, group: Group, sequence: Sequence, tokens: tuple[SampledToken, ...]
    ) -> SequenceOutput:
        """Makes the last token known; those before it are accepted drafts and known already."""
        prefilling = self._books.prefilling
        if prefilling and sequence in prefilling:
            del prefilling[sequence]
            self._books.decoding[sequence] = None
        last, known = tokens[-1].token_id, sequence.token_ids
        if known[-1] == PENDING:
            known[-1] = last
        else:
            known.append(last)
        length = len(known) - len(sequence.request.prompt_token_ids)
        stop = group.rule.check(last, length)
        if stop is not None:
            self._policy.finished(sequence)
            self._books.finish(group, sequence)
        return SequenceOutput(
            sequence.request.request_id,
            sequence.choice,
            length - len(tokens),
            (last,) if len(tokens) == 1 else tuple(token.token_id for token in tokens),
            None if tokens[0].logprobs is None else _logprobs(tokens),
            None if stop is None else stop.reason,
            None if stop is None else stop.token,
            sequence.cached_tokens,
            None,
            None,
            None if group.prompt_logprobs is None else group.take_prompt_logprobs(),
        )

    def _break(self, group: Group, sequence: Sequence) -> SequenceOutput:
        """Ends a choice whose logits were not finite, or that its grammar leaves nothing to say."""
        cursor = sequence.grammar_cursor
        self._books.finish(group, sequence)
        return SequenceOutput(
            request_id=sequence.request.request_id,
            choice=sequence.choice,
            index=sequence.output_length,
            token_ids=(),
            finish_reason=FinishReason.ERROR,
            reason=None if cursor is None else cursor.failure,
        )

    def _fork_followers(self, group: Group, leader: Sequence) -> None:
        """Starts the choices that waited for the prompt; those over `max_num_seqs` queue up."""
        room = len(group.followers) if group.together else self._books.free_slots
        for position, follower in enumerate(group.followers):
            if position >= room:
                self._books.waiting.push((group.key, follower.choice), follower)
                continue
            self._kv.fork(leader, follower, leader.prompt_length)
            follower.cached_tokens = leader.cached_tokens
            follower.transition(State.RUNNING)
            phase = self._books.prefilling if follower.output_length else self._books.decoding
            phase[follower] = None
        group.followers.clear()
        group.leader = None


def _logprobs(tokens: tuple[SampledToken, ...]) -> tuple[TokenLogprobs, ...] | None:
    if tokens[0].logprobs is None:
        return None
    return tuple(token.logprobs for token in tokens if token.logprobs is not None)
