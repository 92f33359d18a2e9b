"""Schedules prompts: chunks of running prefills, and the start of waiting sequences.

Uses the tokens of a step that its decodes leave. Preempts only if the policy lets a waiting
sequence preempt a running one.
"""

from ..core.request import Sequence, State
from ..core.step_plan import ScheduledSequence
from ..kv_cache.kv_cache_manager import Copies
from .encoder_cache import EncoderCache, whole_images
from .preemption import Preemption
from .prefix_tiers import PrefixTiers
from .request_queue import Key, LazyHeap, Queue
from .sequence_group import SequenceGroup
from .state import SchedulerState
from .swapping import Swapping

# The most prompt tokens of a step whose log probabilities are computed: each costs a row of logits,
# and prompts that ask for none should not wait for those that do.
MAX_SCORED = 128


class PrefillScheduler:
    """Schedules the prompts of one scheduler.

    With `whole_prompts`, prompts are not split into chunks: one that exceeds the budget of a step
    gets a step of its own. `encoder` decides about images; None: the model reads none.
    With `whole_images` no chunk ends inside an image: a step may exceed its budget by one.
    `prefix_hits` and `prefix_misses` count tokens of sequences when they start first.
    """

    def __init__(
        self,
        state: SchedulerState,
        preemption: Preemption,
        swapping: Swapping | None,
        watermark: int,
        *,
        tiers: PrefixTiers | None = None,
        whole_prompts: bool = False,
        encoder: EncoderCache | None = None,
        whole_images: bool = False,
    ) -> None:
        self._state = state
        self._kv = state.kv
        self._policy = state.policy
        self._preemption = preemption
        self._swapping = swapping
        self._tiers = tiers
        self._watermark = watermark
        self._whole_prompts = whole_prompts
        self._encoder = encoder
        self._whole_images = whole_images
        self.prefix_hits = 0
        self.prefix_misses = 0

    def continue_prefills(
        self, budget: int, scheduled: list[ScheduledSequence], copies: Copies
    ) -> int:
        """A chunk for each running prefill, earliest first; returns the rest of `budget`."""
        for sequence in sorted(self._state.prefilling, key=self._state.key):
            if budget <= 0:
                break
            budget -= self._schedule_chunk(sequence, budget, scheduled, copies)
        return budget

    def start_waiting(self, budget: int, scheduled: list[ScheduledSequence], copies: Copies) -> int:
        """Starts waiting sequences in order, until one does not fit; returns the rest of `budget`.

        Swapped sequences come first: nothing else starts before all of them are back.
        """
        state = self._state
        if state.swapped:
            budget = self._bring_back(budget, scheduled, copies)
            if state.swapped:
                return budget
        while budget > 0 and (slots := state.free_slots) > 0:
            sequence = state.waiting.peek()
            if sequence is None:
                break
            matched = self._kv.match_prefix(sequence)
            if self._refuse(sequence, matched):
                continue
            if self._whole_prompts and scheduled and len(sequence.token_ids) > budget:
                break
            if state.group_of(sequence).width > slots:
                break
            if not self._has_room(sequence, matched, self._watermark):
                break
            state.waiting.pop()
            self._start(sequence, matched)
            budget -= self._schedule_chunk(sequence, budget, scheduled, copies)
        return budget

    def _bring_back(self, budget: int, scheduled: list[ScheduledSequence], copies: Copies) -> int:
        """Swaps sequences in, in order, until one does not fit; returns the rest of `budget`.

        A sequence comes back only if each running one can still grow by a block: otherwise it would
        be swapped out again at once.
        """
        state = self._state
        while budget > 0 and state.free_slots > 0:
            sequence = state.swapped.peek()
            if sequence is None:
                break
            matched = self._kv.match_prefix(sequence)
            spare = max(self._watermark, state.num_running)
            if not self._has_room(sequence, matched, spare):
                break
            state.swapped.pop()
            self._start(sequence, matched)
            budget -= self._schedule_chunk(sequence, budget, scheduled, copies)
        return budget

    def preempt_for_waiting(self, tokens: int) -> None:
        """Starts the first waiting sequences by preemption, until they have `tokens` tokens to run.

        Called before the step's decodes are scheduled, since some of them may be preempted.
        """
        for queue in (self._state.swapped, self._state.waiting):
            tokens = self._preempt_for_first(queue, tokens)

    def would_preempt(self) -> bool:
        """Whether a waiting sequence may preempt a running one."""
        heads = self._state.swapped.peek(), self._state.waiting.peek()
        return any(head is not None and self._preemption.outranks_any(head) for head in heads)

    def _preempt_for_first(self, queue: Queue | LazyHeap[Key, Sequence], tokens: int) -> int:
        while tokens > 0 and (head := queue.peek()) is not None:
            matched = self._kv.match_prefix(head)
            victims = self._preemption.victims(head, self._needed(head, matched))
            if not victims:
                break
            for victim in victims:
                # otherwise it was started together with another beam
                if victim.state is State.RUNNING:
                    self._preemption.preempt(victim)
            first = queue.pop()
            assert first is head, "the policy let a later request preempt an earlier one"
            self._start(head, matched)
            tokens -= len(head.token_ids) - head.num_computed_tokens
        return tokens

    def _schedule_chunk(
        self, sequence: Sequence, budget: int, scheduled: list[ScheduledSequence], copies: Copies
    ) -> int:
        """Schedules as many known tokens as budget and free blocks allow; returns their number.

        Full blocks enter the prefix cache at once: attention backends write the KV of a whole step
        before they read any, so another sequence that starts in this step can use them.
        """
        start, known = sequence.num_computed_tokens, len(sequence.token_ids)
        if self._whole_prompts:
            budget = max(budget, known - start)
        scored = self._is_scored(sequence)
        if scored:
            budget = min(budget, MAX_SCORED - sum(item.scores for item in scheduled))
        end = min(known, start + budget)
        if self._whole_images:
            end = whole_images(sequence.request.images, start, end)
        end = self._kv.fit(sequence, self._until_fork(sequence, end))
        if self._encoder is not None and sequence.request.images and end > start:
            if self._whole_images:  # there may be fewer blocks
                end = whole_images(sequence.request.images, start, end, grow=False)
            end = self._encoder.reach(sequence.request.images, start, end)
        if end <= start:
            return 0
        self._kv.extend(sequence, end, copies)
        self._kv.register(sequence, start, end)
        run = ScheduledSequence(sequence, start, end - start, end == known)
        if scored:
            run = run._replace(scores=max(0, min(end, sequence.prompt_length - 1) - start))
        scheduled.append(run)
        return end - start

    def fork_at(self, group: SequenceGroup) -> int:
        """The number of tokens that the leader computes before its followers start."""
        return max(1, self.shared_at_fork(group))

    def shared_at_fork(self, group: SequenceGroup) -> int:
        """The number of tokens whose KV and state followers share with their leader.

        With a recurrent state the leader stops before the prompt's last token: a follower computes
        it again, and the state after it would be too late.
        """
        return len(group.request.prompt_token_ids) - (self._kv.state is not None)

    def _until_fork(self, sequence: Sequence, end: int) -> int:
        """Ends the run of a leader where its followers start, if they share its state."""
        if self._kv.state is None:
            return end
        group = self._state.group_of(sequence)
        if sequence is not group.leader or not group.followers:
            return end
        return min(end, self.fork_at(group))

    def _is_scored(self, sequence: Sequence) -> bool:
        if sequence.request.params.prompt_logprobs is None:
            return False
        return self._state.group_of(sequence).scores_prompt

    def _refuse(self, sequence: Sequence, matched: list[int]) -> bool:
        """Ends the request if the policy refuses it; returns whether it did.

        Only leaders are asked about, since nothing of their requests has run yet.
        """
        group = self._state.group_of(sequence)
        if sequence is not group.leader:
            return False
        rows = self._kv.rows_of(matched)
        tokens = len(sequence.token_ids) - rows * self._kv.block_size
        if self._tiers is not None:
            tokens -= self._tiers.tokens_on_host(sequence, rows)
        reason = self._policy.refusal(sequence, tokens)
        if reason is not None:
            self._state.end(group, reason)
        return reason is not None

    def _has_room(self, sequence: Sequence, matched: list[int], spare: int) -> bool:
        """Whether all known tokens fit beside `spare` blocks. A sequence alone may use all blocks.

        Running prefills lose nothing: budget is left only if each got its blocks, or none is free.
        """
        if self._state.num_running == 0:
            return True
        return self._needed(sequence, matched) + spare <= self._kv.pool.num_free

    def _needed(self, sequence: Sequence, matched: list[int]) -> int:
        """Free blocks needed for all known tokens, including those of co-scheduled beams."""
        group, kv = self._state.group_of(sequence), self._kv
        needed = kv.blocks_to_start(sequence, matched)
        if group.co_scheduled:
            shared = self.shared_at_fork(group) // kv.block_size
            rows = sum(kv.rows_for(len(each.token_ids)) - shared for each in group.followers)
            needed += (rows + group.width - len(group.sequences)) * kv.groups.count
            needed += group.width * kv.groups.state
        return needed

    def _start(self, sequence: Sequence, matched: list[int]) -> None:
        if sequence.state is State.SWAPPED:
            assert self._swapping is not None, "a sequence was swapped to nowhere"
            self._swapping.swap_in(sequence, matched)
        else:
            self._kv.start(sequence, matched)
            if self._tiers is not None:
                self._tiers.load(sequence, counted=sequence.state is State.WAITING)
        if sequence.state is State.WAITING:
            hits = sequence.num_computed_tokens
            sequence.cached_tokens = min(hits, sequence.prompt_length)
            self.prefix_hits += hits
            self.prefix_misses += len(sequence.token_ids) - hits
            self._policy.admitted(sequence, len(sequence.token_ids) - hits)
        sequence.transition(State.RUNNING)
        self._state.prefilling[sequence] = None
        group = self._state.group_of(sequence)
        if group.co_scheduled:
            self._state.co_scheduled.add(group)
