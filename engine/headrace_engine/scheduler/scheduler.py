"""Iteration-level scheduling: decides what each step computes, within one budget of tokens.

It runs no model and reads no clock. In each step decodes come first, then chunks of running
prefills, then chunks of waiting sequences that start now.

It never deadlocks: a request that does not fit the whole pool is refused, the earliest running
sequence is never preempted for a later one, and a sequence that runs alone has the whole pool. The
policy defines the order. Scheduling a step costs O(running), however many sequences wait.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice

from ..core.batch_snapshot import BatchSnapshot, SequenceProgress
from ..core.config import EngineConfig
from ..core.errors import RequestError
from ..core.outputs import SampledToken, SequenceOutput, TokenLogprobs
from ..core.request import PENDING, EngineRequest, FinishReason, Sequence, SequenceView, State
from ..core.stats import SchedulerStats
from ..core.step_cost import PrefillDecodeCosts
from ..core.step_plan import NO_DRAFTS, Drafts, ScheduledSequence, SchedulerOutput, StepResult
from ..kv_cache.host_block_tables import HostBlockTables
from ..kv_cache.kv_cache_manager import Copies, KVCacheManager, unused_slots
from ..kv_cache.shared_kv_cache import SharedKVCache
from .async_scheduling import advance
from .buffered_outputs import BufferedOutputs
from .encoder_cache import EncoderCache
from .input_validation import Limits, check_request
from .lora_stats import LoRAStats, lora_stats
from .policies import Policy
from .preemption import Preemption
from .prefill import PrefillScheduler
from .prefill_budget import PrefillBudget
from .prefix_tiers import PrefixTiers
from .sequence_group import SequenceGroup, open_group
from .snapshots import SnapshotScheduler
from .spec_decode import DraftScheduler
from .state import SchedulerState
from .stop_checker import StopRule
from .swapping import Swapping

# Seconds after which the engine looks again for new requests.
LONGEST_WAIT = 0.01
NO_MOVES: tuple[tuple[()], tuple[()]] = ((), ())


class Scheduler:
    """Owns all sequences and their blocks.

    `schedule` and `update` alternate; after an `advance` one more `schedule` may come before the
    `update`. `add` and `abort` may come at any time between calls. `shared` has KV that outlives
    this engine; None: there is no such tier.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        policy: Policy,
        shared: SharedKVCache | None = None,
    ) -> None:
        self._limits = limits
        self._policy = policy
        self._token_budget = config.max_num_batched_tokens
        # Each running sequence needs a token in the step.
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.kv_cache = KVCacheManager(
            limits.num_blocks,
            limits.block_size,
            config.enable_prefix_caching,
            limits.kv_groups,
            config.max_num_batched_tokens,
        )
        self._watermark = int(config.watermark * limits.num_blocks)
        swapped = limits.kv_groups.count == 1 and not limits.kv_groups.state
        assert swapped or not limits.num_host_blocks, "groups and states are not swapped"
        host = (
            HostBlockTables(limits.num_host_blocks, self.kv_cache)
            if limits.num_host_blocks
            else None
        )
        self._max_loras = config.max_loras if config.enable_lora else None
        self._state = SchedulerState(
            policy, self.kv_cache, self._max_running, host, self._max_loras
        )
        self._costs = PrefillDecodeCosts()
        self._swapping = None if host is None else Swapping(self._state, host, self._costs)
        self._tiers = self._make_tiers(config, shared)
        self._preemption = Preemption(self._state, self._swapping, self._watermark)
        self._encoder = _make_encoder_cache(config, limits)
        self._prefill = PrefillScheduler(
            self._state,
            self._preemption,
            self._swapping,
            self._watermark,
            tiers=self._tiers,
            whole_prompts=limits.pooler is not None and limits.pooler.bidirectional,
            encoder=self._encoder,
            whole_images=limits.images is not None and limits.images.whole,
        )
        self._buffered = BufferedOutputs(self._state, limits)
        self._prefill_budget = PrefillBudget(config.itl_target, self._costs)
        self._draft_scheduler = DraftScheduler(self.kv_cache, self._watermark)
        self._snapshots = SnapshotScheduler.of(self.kv_cache, self._watermark)
        self._arrivals = 0
        self._step_prefill = 0
        self._step_decode = 0
        self._last_step: SchedulerOutput | None = None
        # Sequences whose state the present update has set back to the one before their drafts.
        self._rolled_back: list[Sequence] = []

    def _make_tiers(self, config: EngineConfig, shared: SharedKVCache | None) -> PrefixTiers | None:
        """The tiers below the prefix cache.

        None if the device's blocks alone are not what a sequence needs to go on: with a sliding
        window, whose blocks are released, or with a draft model, which has KV of its own.
        """
        window = self.kv_cache.groups.window
        if not config.enable_prefix_caching or window is not None or config.has_draft_model:
            return None
        if self._swapping is None:
            return None
        step_blocks = config.max_num_batched_tokens // self._limits.block_size + self._max_running
        return PrefixTiers(self._state, self._swapping, self._costs, shared, step_blocks)

    @property
    def has_work(self) -> bool:
        return bool(self._state.groups) or (self._tiers is not None and self._tiers.has_saves)

    def wait_for_work(self) -> None:
        """Waits shortly for KV from the shared tier, which requests need before they start.

        Called when no step could be scheduled, although no step is in flight.
        """
        if self._tiers is not None and self._tiers.fetching:
            self._tiers.wait(LONGEST_WAIT)
        else:
            assert not self.has_work, "sequences wait, but none can be scheduled"

    @property
    def prefix_tiers(self) -> PrefixTiers | None:
        """The tiers below the prefix cache; None if there are none."""
        return self._tiers

    @property
    def host_block_tables(self) -> HostBlockTables | None:
        """The host blocks of swapped sequences; None without swap space."""
        return self._state.host

    def sequences(self) -> dict[str, tuple[SequenceView, ...]]:
        """The unfinished sequences by request. Callable from any thread."""
        return {
            group.request.request_id: tuple(map(SequenceView.of, list(group.sequences)))
            for group in list(self._state.groups.values())
        }

    def snapshot(self, most: int) -> BatchSnapshot:
        """At most `most` unfinished sequences, and the statistics."""
        state = self._state
        last = () if self._last_step is None else self._last_step.scheduled
        computed = {run.sequence: run.length + len(run.drafts) for run in last}
        others = (
            sequence
            for group in state.groups.values()
            for sequence in group.sequences
            if sequence.state is not State.RUNNING
        )
        shown = tuple(
            self._progress(sequence, computed.get(sequence, 0))
            for sequence in islice(chain(state.running(), others), most)
        )
        return BatchSnapshot(
            stats=self.stats(),
            blocks_shared=self.kv_cache.pool.num_shared,
            sequences=shown,
            left_out=state.unfinished - len(shown),
        )

    def _progress(self, sequence: Sequence, step_tokens: int) -> SequenceProgress:
        request = sequence.request
        phase: str = sequence.state
        if sequence.state is State.RUNNING:
            phase = "prefill" if sequence in self._state.prefilling else "decode"
        room = self._limits.max_length - sequence.prompt_length
        rule = self._state.group_of(sequence).rule
        return SequenceProgress(
            request_id=request.request_id,
            choice=sequence.choice,
            phase=phase,
            prompt=sequence.prompt_length,
            computed=sequence.num_computed_tokens,
            output=sequence.output_length - (sequence.token_ids[-1] == PENDING),
            max_output=min(room, rule.max_output, request.params.max_tokens or room),
            step_tokens=step_tokens,
        )

    def lora_stats(self) -> LoRAStats | None:
        """The LoRA adapters in use; None if LoRA is off. Callable from any thread."""
        if self._max_loras is None:
            return None
        return lora_stats(self._max_loras, list(self._state.groups.values()))

    def running(self) -> Iterator[Sequence]:
        """The running sequences; together they own all used blocks. Valid until the next call."""
        return self._state.running()

    def swapped(self) -> Iterator[Sequence]:
        """The sequences in host memory, in no particular order."""
        return iter(self._state.swapped)

    def stats(self) -> SchedulerStats:
        pool, state, swapping = self.kv_cache.pool, self._state, self._swapping
        tiers, encoder = self._tiers, self._encoder
        running, swapped = state.num_running, len(state.swapped)
        unused = unused_slots(state.running(), self._limits.block_size, self.kv_cache.groups.count)
        block_bytes = self._limits.bytes_per_block
        return SchedulerStats(
            running=running,
            waiting=state.unfinished - running - swapped,
            swapped=swapped,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            blocks_free=pool.num_free - pool.num_cached,
            preemptions=self._preemption.recomputed,
            prefix_hit_tokens=self._prefill.prefix_hits,
            prefix_miss_tokens=self._prefill.prefix_misses,
            step_prefill_tokens=self._step_prefill,
            step_decode_tokens=self._step_decode,
            swaps=0 if swapping is None else swapping.swapped_out,
            swap_out_bytes=0 if swapping is None else swapping.blocks_out * block_bytes,
            swap_in_bytes=0 if swapping is None else swapping.blocks_in * block_bytes,
            host_blocks_used=0 if swapping is None else swapping.host.pool.num_used,
            host_blocks_free=0 if swapping is None else swapping.host.pool.num_free,
            kv_slots_used=pool.num_used * self._limits.block_size - unused,
            kv_slots_unused=unused,
            host_hit_tokens=0 if tiers is None else tiers.host_hits,
            shared_hit_tokens=0 if tiers is None else tiers.shared_hits,
            swap_seconds=0.0 if swapping is None else swapping.seconds,
            shared=None if tiers is None or tiers.shared is None else tiers.shared.stats(),
            images_encoded=0 if encoder is None else encoder.encoded,
            image_tokens_encoded=0 if encoder is None else encoder.tokens,
            encode_seconds=0.0 if encoder is None else encoder.seconds,
            encoder_cache_queries=0 if encoder is None else encoder.queries,
            encoder_cache_hits=0 if encoder is None else encoder.hits,
        )

    def add(self, request: EngineRequest) -> list[SequenceOutput]:
        """Queues a request. Returns the last outputs of resumed choices that had ended already.

        Raises RequestError if the request cannot run here, or its id is in use.
        """
        if request.request_id in self._state.groups:
            raise RequestError(f"request_id {request.request_id!r} is running: choose another")
        check_request(request, self._limits)
        room = self._limits.max_length - len(request.prompt_token_ids)
        rule = StopRule.of(request.params, self._limits.eos_token_ids, room)
        self._arrivals += 1
        key = self._policy.key(request, self._arrivals)
        if request.params.answers_at_end:
            self._open(self._buffered.open(request, key, rule))
            return []
        group, ended = open_group(request, key, rule)
        if group.sequences:
            self._open(group)
        return ended

    def _open(self, group: SequenceGroup) -> None:
        """Adds a new request. It is queued now, or when its KV has been fetched."""
        self._state.open(group)
        if self._tiers is None or not self._tiers.hold(group):
            self._state.queue_leader(group)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Ends one choice, or all choices, without output. Ignores unknown requests."""
        if choice is not None and request_id in self._buffered:
            if not self._buffered.mute(request_id, choice):
                return
            choice = None
        self._buffered.forget(request_id)
        group = self._state.groups.get(request_id)
        if group is None:
            return
        for sequence in group.sequences.copy():
            if choice is None or sequence.choice == choice:
                self._state.finish(group, sequence)

    def take_aborted_by_policy(self) -> list[SequenceOutput]:
        """The last outputs of choices that the policy ended since the previous call."""
        aborted_by_policy, self._state.aborted_by_policy = self._state.aborted_by_policy, []
        return self._buffered.filter(aborted_by_policy) if aborted_by_policy else aborted_by_policy

    def forget_prefixes(self) -> None:
        """Forgets the KV on the device, whose memory is given back. No request may be left."""
        assert not self.has_work, "requests need their KV"
        if self.kv_cache.state is not None:
            self.kv_cache.state.settle()
        self.kv_cache.pool.forget_all()

    def draftable(self) -> list[tuple[Sequence, int]]:
        """The decoding sequences, and how many drafts each can use before its output is full."""
        groups = self._state.groups
        return [
            (seq, groups[seq.request.request_id].rule.max_output - seq.output_length - 1)
            for seq in self._state.decoding
            if seq.request.candidates is None  # beam search chooses a beam's next token
        ]

    def advance(self, scheduler_output: SchedulerOutput) -> bool:
        """Counts a submitted step as computed; its tokens are not known yet.

        Returns whether the next step can be scheduled without the tokens; if not, this step's
        `update` must come first. Call it after the update of the previous step and before the
        next `schedule`.
        """
        return advance(self._state, scheduler_output)

    def schedule(
        self, drafts: Drafts = NO_DRAFTS, *, ahead: bool = False
    ) -> SchedulerOutput | None:
        """Decides the next step and allocates its blocks; None if there is nothing to do.

        `drafts` run as far as budget and free blocks are left. The policy may end requests here:
        see `take_aborted_by_policy`. `ahead` means that the step counted by `advance` is still in
        flight. Then the result is None, too, if a preemption is needed: it has to wait for that
        step.
        """
        state, swapping = self._state, self._swapping
        needy = self._end_and_preempt(ahead)
        if needy is None:
            return None
        copies: Copies = []
        for sequence in needy:
            self.kv_cache.extend(sequence, sequence.num_computed_tokens + 1, copies)
        scheduled = [
            ScheduledSequence(seq, seq.num_computed_tokens, 1, True) for seq in state.decoding
        ]
        decodes = len(scheduled)
        budget = room = self._prefill_budget.prompt_tokens(self._token_budget - decodes, decodes)
        if state.prefilling:
            budget = self._prefill.continue_prefills(budget, scheduled, copies)
        if state.waiting or state.swapped:
            budget = self._prefill.start_waiting(budget, scheduled, copies)
        if not scheduled:
            return None if ahead else self._save_only()
        prefill = room - budget
        tokens = decodes + prefill
        if drafts and (rest := self._token_budget - tokens):
            tokens += self._draft_scheduler.add(drafts, scheduled, decodes, rest, copies)
        if self._snapshots is not None:
            self._snapshots.take(scheduled)
        saves = () if self._tiers is None else self._tiers.take_saves()
        moves = NO_MOVES if swapping is None else swapping.take()
        states = self.kv_cache.state
        zeroed = () if states is None else states.take_zeroed()
        images = NO_MOVES if self._encoder is None else self._encoder.finish_step()
        return SchedulerOutput(
            tuple(scheduled), tuple(copies), tokens, *moves, prefill, ahead, zeroed, saves, *images
        )

    def _save_only(self) -> SchedulerOutput | None:
        """A step that only copies blocks for the shared tier, if nothing else is to be done."""
        if self._state.groups or self._tiers is None or not self._tiers.has_saves:
            return None
        saves = self._tiers.take_saves()
        if saves:
            return SchedulerOutput((), (), 0, saves=saves)
        self._tiers.update()
        return None

    def _end_and_preempt(self, ahead: bool) -> list[Sequence] | None:
        """Ends expired requests and preempts sequences; returns the decodes that need a block.

        None if a preemption has to wait for the step in flight.
        """
        state, policy = self._state, self._policy
        if self._swapping is not None:
            self._swapping.host.settle()
        if self.kv_cache.state is not None:
            self.kv_cache.state.settle()
        if self._tiers is not None:
            self._tiers.begin_step()
        for request_id, reason in policy.expired():
            state.end(state.groups[request_id], reason)
        if policy.preempts and (state.waiting or state.swapped):
            if ahead and self._prefill.would_preempt():
                return None
            self._prefill.preempt_for_waiting(self._token_budget - len(state.decoding))
        return self._preemption.make_room(preempting=not ahead)

    def update(self, scheduler_output: SchedulerOutput, result: StepResult) -> list[SequenceOutput]:
        """Takes over the result of a step. Skips choices that were aborted meanwhile."""
        if result.embeddings:
            return self._update_embeddings(scheduler_output, result.embeddings)
        self._learn(scheduler_output, result)
        self._score(scheduler_output, result)
        outputs: list[SequenceOutput] = []
        sampled = iter(result.sampled)
        size, groups = self._limits.block_size, self._state.groups
        slides = self.kv_cache.groups.window is not None
        for sequence, start, length, samples, drafts, _ in scheduler_output.scheduled:
            tokens = next(sampled) if samples else None
            if sequence.state is not State.RUNNING:
                continue
            group = groups[sequence.request.request_id]
            if drafts and tokens is not None:
                tokens = self._accept(group, sequence, tokens)
                length = self._computed_length(sequence, length, drafts, tokens)
            end = sequence.num_computed_tokens = start + length
            if end % size < length:  # the run has filled a block
                self.kv_cache.register(sequence, start, end)
            if drafts:
                self.kv_cache.truncate(sequence)
            if sequence is group.leader and end >= self._prefill.fork_at(group):
                self._fork_followers(group, sequence)
            # after the fork, since followers may need blocks outside the leader's window
            if slides:
                self.kv_cache.release_outside_window(sequence)
            if samples:
                outputs.append(
                    self._end_with_error(group, sequence)
                    if tokens is None
                    else self._append(group, sequence, tokens)
                )
        self._settle_states()
        self._policy.stepped(scheduler_output)
        self._last_step = scheduler_output if self._state.groups else None
        return self._buffered.filter(outputs)

    def _learn(self, scheduler_output: SchedulerOutput, result: StepResult) -> None:
        """Learns the costs of the step, for statistics and estimates."""
        self._step_prefill = scheduler_output.prefill_tokens
        self._step_decode = scheduler_output.num_tokens - scheduler_output.prefill_tokens
        computing = result.seconds - result.swap_seconds
        self._costs.observe(self._step_decode, self._step_prefill, computing)
        if self._swapping is not None:
            self._swapping.observe(scheduler_output, result)
        if self._encoder is not None:
            self._encoder.seconds += result.encode_seconds
        if self._tiers is not None:
            self._tiers.update()

    def _score(self, scheduler_output: SchedulerOutput, result: StepResult) -> None:
        """Collects log probabilities of prompts until the first output of their requests."""
        if not result.scored:
            return
        runs = [item for item in scheduler_output.scheduled if item.scores]
        for run, found in zip(runs, result.scored, strict=True):
            group = self._state.groups.get(run.sequence.request.request_id)
            if group is not None:
                group.score(run.start, found)

    def _update_embeddings(
        self, scheduler_output: SchedulerOutput, embeddings: tuple[bytes | None, ...]
    ) -> list[SequenceOutput]:
        """Like `update`, for embeddings: a sequence with a complete prompt ends with its
        embedding."""
        ending = [item.sequence for item in scheduler_output.scheduled if item.samples]
        prefills = tuple(item._replace(samples=False) for item in scheduler_output.scheduled)
        self.update(replace(scheduler_output, scheduled=prefills), StepResult(()))
        return [
            self._embed(sequence, embedding)
            for sequence, embedding in zip(ending, embeddings, strict=True)
            if sequence.state is State.RUNNING
        ]

    def _embed(self, sequence: Sequence, embedding: bytes | None) -> SequenceOutput:
        group = self._state.groups[sequence.request.request_id]
        if embedding is None:
            return self._end_with_error(group, sequence)
        self._policy.finished(sequence)
        self._state.finish(group, sequence)
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
        self, group: SequenceGroup, sequence: Sequence, tokens: tuple[SampledToken, ...]
    ) -> tuple[SampledToken, ...]:
        """Appends accepted drafts. Returns the tokens up to the first that ends the output."""
        tokens = group.rule.cut(tokens, sequence.output_length)
        sequence.token_ids.extend(token.token_id for token in tokens[:-1])
        return tokens

    def _computed_length(
        self,
        sequence: Sequence,
        length: int,
        drafts: tuple[int, ...],
        tokens: tuple[SampledToken, ...],
    ) -> int:
        """How much of a run of `length` tokens and `drafts` counts as computed.

        With a recurrent state nothing does if a draft was rejected: the state is again that before
        the run, and the accepted tokens are computed again like a prompt.
        """
        accepted, states = len(tokens) - 1, self.kv_cache.state
        if states is None:
            return length + accepted
        whole = accepted == len(drafts)
        states.verified(sequence, accepted=whole)
        if not whole:
            self._rolled_back.append(sequence)
        return length + accepted if whole else 0

    def _settle_states(self) -> None:
        """Ends a step for recurrent states: sequences that were rolled back prefill again."""
        if self.kv_cache.state is None:
            return
        self.kv_cache.state.settle()
        for sequence in self._rolled_back:
            if sequence.state is State.RUNNING:
                del self._state.decoding[sequence]
                self._state.prefilling[sequence] = None
        self._rolled_back.clear()

    def _append(
        self, group: SequenceGroup, sequence: Sequence, tokens: tuple[SampledToken, ...]
    ) -> SequenceOutput:
        """Appends the last of `tokens`; those before it are accepted drafts, appended already."""
        prefilling = self._state.prefilling
        if prefilling and sequence in prefilling:
            del prefilling[sequence]
            self._state.decoding[sequence] = None
        last, known = tokens[-1].token_id, sequence.token_ids
        if known[-1] == PENDING:
            known[-1] = last
        else:
            known.append(last)
        length = len(known) - len(sequence.request.prompt_token_ids)
        stop = group.rule.check(last, length)
        if stop is not None:
            self._policy.finished(sequence)
            self._state.finish(group, sequence)
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

    def _end_with_error(self, group: SequenceGroup, sequence: Sequence) -> SequenceOutput:
        """Ends a choice whose logits are not finite, or whose grammar allows no further token."""
        cursor = sequence.grammar_cursor
        self._state.finish(group, sequence)
        return SequenceOutput(
            request_id=sequence.request.request_id,
            choice=sequence.choice,
            index=sequence.output_length,
            token_ids=(),
            finish_reason=FinishReason.ERROR,
            reason=None if cursor is None else cursor.failure,
        )

    def _fork_followers(self, group: SequenceGroup, leader: Sequence) -> None:
        """Starts the choices that waited for the prompt; those above `max_num_seqs` are queued."""
        room = len(group.followers) if group.co_scheduled else self._state.free_slots
        for position, follower in enumerate(group.followers):
            if position >= room:
                self._state.waiting.push((group.key, follower.choice), follower)
                continue
            self.kv_cache.fork(leader, follower, self._prefill.shared_at_fork(group))
            follower.cached_tokens = leader.cached_tokens
            follower.transition(State.RUNNING)
            phase = self._state.prefilling if follower.output_length else self._state.decoding
            phase[follower] = None
        group.followers.clear()
        group.leader = None


def _make_encoder_cache(config: EngineConfig, limits: Limits) -> EncoderCache | None:
    if limits.images is None:
        return None
    budget = config.max_num_encoder_input_tokens or config.max_num_batched_tokens
    return EncoderCache(limits.images.room, budget)


def _logprobs(tokens: tuple[SampledToken, ...]) -> tuple[TokenLogprobs, ...] | None:
    if tokens[0].logprobs is None:
        return None
    return tuple(token.logprobs for token in tokens if token.logprobs is not None)
