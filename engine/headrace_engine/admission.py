"""Prompts into steps: chunks of running prefills, and who of those that wait starts now.

Works on a scheduler's books within the tokens that its decodes leave. It never preempts, except
where the policy says that one that waits may take the place of one that runs.
"""

from .books import Books
from .kv_cache import Copies
from .plan import ScheduledSequence
from .pressure import MemoryPressure
from .request import Sequence, State
from .swapping import Swapping
from .waiting import Key, LazyHeap, Queue

# Tokens of a step whose log probabilities are wanted: each costs a row of logits, and prompts that
# ask for none should not wait for those that do.
MAX_SCORED = 128


class Admission:
    """Starts sequences for one scheduler; counts the prefix-cache tokens of first starts.

    With `whole_prompts` each prompt is in one step: one longer than a step's budget has a step of
    its own.
    """

    def __init__(
        self,
        books: Books,
        pressure: MemoryPressure,
        swapping: Swapping | None,
        watermark: int,
        *,
        whole_prompts: bool = False,
    ) -> None:
        self._books = books
        self._kv = books.kv
        self._policy = books.policy
        self._pressure = pressure
        self._swapping = swapping
        self._watermark = watermark
        self._whole_prompts = whole_prompts
        self.prefix_hits = 0
        self.prefix_misses = 0

    def continue_prefills(
        self, budget: int, scheduled: list[ScheduledSequence], copies: Copies
    ) -> int:
        """A chunk for each running prefill, earliest first. Returns the rest of the budget."""
        for sequence in sorted(self._books.prefilling, key=self._books.key):
            if budget == 0:
                break
            budget -= self._schedule_chunk(sequence, budget, scheduled, copies)
        return budget

    def admit(self, budget: int, scheduled: list[ScheduledSequence], copies: Copies) -> int:
        """Starts waiting sequences in order, until one does not fit. Returns the budget's rest.

        Nothing starts before all that was swapped out is back.
        """
        books = self._books
        if books.swapped:
            budget = self._bring_back(budget, scheduled, copies)
            if books.swapped:
                return budget
        while budget > 0 and (slots := books.free_slots) > 0:
            sequence = books.waiting.peek()
            if sequence is None:
                break
            matched = self._kv.match_prefix(sequence)
            if self._refuse(sequence, matched):
                continue
            if self._whole_prompts and scheduled and len(sequence.token_ids) > budget:
                break
            if books.group_of(sequence).width > slots:
                break
            if not self._has_room(sequence, matched, self._watermark):
                break
            books.waiting.pop()
            self._start(sequence, matched)
            budget -= self._schedule_chunk(sequence, budget, scheduled, copies)
        return budget

    def _bring_back(self, budget: int, scheduled: list[ScheduledSequence], copies: Copies) -> int:
        """Swaps sequences in, in order, until one does not fit. Returns the budget's rest.

        One comes back only if each running sequence may grow by a block besides: else it would be
        swapped out again at once.
        """
        books = self._books
        while budget > 0 and books.free_slots > 0:
            sequence = books.swapped.peek()
            if sequence is None:
                break
            matched = self._kv.match_prefix(sequence)
            spare = max(self._watermark, books.num_running)
            if not self._has_room(sequence, matched, spare):
                break
            books.swapped.pop()
            self._start(sequence, matched)
            budget -= self._schedule_chunk(sequence, budget, scheduled, copies)
        return budget

    def displace(self, tokens: int) -> None:
        """Starts what waits first in the place of what it may preempt, until `tokens` are given.

        Comes before the step's decodes are planned, as some of them are what gives way.
        """
        for queue in (self._books.swapped, self._books.waiting):
            tokens = self._displace_for(queue, tokens)

    def wants_displacing(self) -> bool:
        """Whether something that waits may take the place of something that runs."""
        heads = self._books.swapped.peek(), self._books.waiting.peek()
        return any(head is not None and self._pressure.outranks_any(head) for head in heads)

    def _displace_for(self, queue: Queue | LazyHeap[Key, Sequence], tokens: int) -> int:
        while tokens > 0 and (head := queue.peek()) is not None:
            matched = self._kv.match_prefix(head)
            victims = self._pressure.victims(head, self._needed(head, matched))
            if not victims:
                break
            for victim in victims:
                if victim.state is State.RUNNING:  # beams went with the first of them
                    self._pressure.preempt(victim)
            first = queue.pop()
            assert first is head, "the policy let a later request preempt an earlier one"
            self._start(head, matched)
            tokens -= len(head.token_ids) - head.computed
        return tokens

    def _schedule_chunk(
        self, sequence: Sequence, budget: int, scheduled: list[ScheduledSequence], copies: Copies
    ) -> int:
        """As much of the known tokens as budget and free blocks allow; returns their number.

        Full blocks can be hit from here on: attention backends write the KV of a whole step before
        they read any, so one that starts in this step need not compute them again.
        """
        start, known = sequence.computed, len(sequence.token_ids)
        if self._whole_prompts:
            budget = max(budget, known - start)
        scored = self._is_scored(sequence)
        if scored:
            budget = min(budget, MAX_SCORED - sum(item.scores for item in scheduled))
        end = self._kv.fit(sequence, min(known, start + budget))
        if end <= start:
            return 0
        self._kv.extend(sequence, end, copies)
        self._kv.register(sequence, start, end)
        run = ScheduledSequence(sequence, start, end - start, end == known)
        if scored:
            run = run._replace(scores=max(0, min(end, sequence.prompt_length - 1) - start))
        scheduled.append(run)
        return end - start

    def _is_scored(self, sequence: Sequence) -> bool:
        if sequence.request.params.prompt_logprobs is None:
            return False
        return self._books.group_of(sequence).scores_prompt

    def _refuse(self, sequence: Sequence, matched: list[int]) -> bool:
        """Whether the policy ended the request of a leader: nothing of that has run yet."""
        group = self._books.group_of(sequence)
        if sequence is not group.leader:
            return False
        tokens = len(sequence.token_ids) - self._kv.rows_of(matched) * self._kv.block_size
        reason = self._policy.refusal(sequence, tokens)
        if reason is not None:
            self._books.end(group, reason)
        return reason is not None

    def _has_room(self, sequence: Sequence, matched: list[int], spare: int) -> bool:
        """Whether all known tokens fit beside `spare` blocks, which one that runs alone may use.

        No running prefill is robbed: budget is left only if each got all its blocks, or none is
        free.
        """
        if self._books.num_running == 0:
            return True
        return self._needed(sequence, matched) + spare <= self._kv.pool.num_free

    def _needed(self, sequence: Sequence, matched: list[int]) -> int:
        """Free blocks for all that it knows, and for the beams that come with it."""
        group, kv = self._books.group_of(sequence), self._kv
        needed = kv.blocks_to_admit(sequence, matched)
        if group.together:
            shared = sequence.prompt_length // kv.block_size
            rows = sum(kv.rows_for(len(each.token_ids)) - shared for each in group.followers)
            needed += (rows + group.width - len(group.sequences)) * kv.groups.count
        return needed

    def _start(self, sequence: Sequence, matched: list[int]) -> None:
        if sequence.state is State.SWAPPED:
            assert self._swapping is not None, "a sequence was swapped to nowhere"
            self._swapping.swap_in(sequence, matched)
        else:
            self._kv.start(sequence, matched)
        if sequence.state is State.WAITING:
            hits = sequence.computed
            sequence.cached_tokens = min(hits, sequence.prompt_length)
            self.prefix_hits += hits
            self.prefix_misses += len(sequence.token_ids) - hits
            self._policy.admitted(sequence, len(sequence.token_ids) - hits)
        sequence.transition(State.RUNNING)
        self._books.prefilling[sequence] = None
        group = self._books.group_of(sequence)
        if group.together:
            self._books.together.add(group)
