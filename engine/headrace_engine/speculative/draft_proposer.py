"""Drafts from a draft model: it runs all sequences as a batch over its own paged KV cache.

Each of its steps gives one draft for each sequence. It samples with the request's parameters and
the random number that the target uses at that position, so that both choose the same token if their
distributions are close enough.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..core.request import Sequence, State
from ..core.step_cost import Rate
from ..core.step_plan import NO_DRAFTS, Drafts, SampleRow, ScheduledSequence, SchedulerOutput
from ..kv_cache.kv_cache_manager import Copies, KVCacheManager
from .step_cost_model import DISCOUNT, MEMORY, StepCostModel

# Steps of at least this many tokens are used to measure the cost of reading a token.
READING = 64


class Drafter(Protocol):
    """A draft model, ready to serve."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...

    def execute(
        self, scheduler_output: SchedulerOutput, rows: tuple[SampleRow, ...]
    ) -> tuple[int | None, ...]:
        """Computes the step's runs and samples `rows`; None for a row with broken logits."""


@dataclass(slots=True, eq=False)
class DraftState:
    """A sequence of the target and the draft model's copy of it, `own`, with its own KV.

    `own` has `known` tokens of the target, followed by the drafts. `wanted` is the number of drafts
    asked for in this round. The full blocks below position `cached` are in the prefix cache. A
    sequence `out_of_vocabulary` has a token that the draft model lacks, so it gets no drafts.
    """

    target: Sequence
    own: Sequence
    known: int = 0
    wanted: int = 0
    cached: int = 0
    out_of_vocabulary: bool = False

    @classmethod
    def of(cls, sequence: Sequence) -> "DraftState":
        return cls(sequence, Sequence(sequence.request, sequence.choice, []))

    @property
    def drafts(self) -> tuple[int, ...]:
        return tuple(self.own.token_ids[self.known :])

    def sync(self, vocab_size: int) -> None:
        """Takes over the target's new tokens, and keeps the KV of accepted drafts."""
        own, new = self.own, self.target.token_ids[self.known :]
        right = 0
        for token, draft in zip(new, own.token_ids[self.known :], strict=False):
            if token != draft:
                break
            right += 1
        del own.token_ids[self.known + right :]
        right_end = len(own.token_ids)
        own.token_ids.extend(new[right:])
        self.known = len(own.token_ids)
        # The last token is always computed, if necessary again: drafts follow from its logits.
        own.num_computed_tokens = min(own.num_computed_tokens, right_end, self.known - 1)
        self.out_of_vocabulary |= max(new, default=0) >= vocab_size


class DraftModelProposer:
    """Proposes drafts with a draft model, whose KV blocks it owns.

    `token_budget` is the most tokens of one of its steps. A new sequence is prefilled first, which
    may take several rounds. A sequence for which no blocks are free gets no drafts. `clock` counts
    seconds.
    """

    def __init__(
        self,
        model: Drafter,
        token_budget: int,
        *,
        prefix_caching: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model, self._token_budget, self._clock = model, token_budget, clock
        self.kv_cache = KVCacheManager(model.num_blocks, model.block_size, prefix_caching)
        # Least recently used first.
        self._states: dict[Sequence, DraftState] = {}
        self._costs, self._reading, self._rests = StepCostModel(), Rate(), 0

    def step_seconds(self, count: int) -> float | None:
        """Interpolated between measured steps, but at least the cost of `count` prompt tokens."""
        if not self._costs.is_known:
            return None
        return max(self._costs.interpolated(count), self._reading.of(count))

    def prefill_seconds(self, sequence: Sequence) -> float:
        state = self._states.get(sequence)
        seen = 0 if state is None else state.own.num_computed_tokens
        return self._reading.of(max(0, len(sequence.token_ids) - 1 - seen))

    def propose(self, wanted: list[tuple[Sequence, int]]) -> Drafts:
        self._begin_round()
        if not wanted:
            self._rest()
            return NO_DRAFTS
        states = {sequence: self._updated(sequence, count) for sequence, count in wanted}
        asked = [state for state in states.values() if state.wanted > 0]
        live = self._catch_up(asked)
        while live := [state for state in live if len(state.drafts) < state.wanted]:
            begun, count = self._clock(), len(live)
            live = self._step([(state, 1) for state in live])
            self._costs.observe(count, self._clock() - begun)
        found = {sequence: state.drafts for sequence, state in states.items()}
        return {sequence: drafts for sequence, drafts in found.items() if drafts}

    def _rest(self) -> None:
        """Lowers the estimates in rounds without drafts, so that they are tried again."""
        self._costs.skip()
        self._rests += 1
        if self._rests % MEMORY == 0:
            self._reading.scale(DISCOUNT)

    def _updated(self, sequence: Sequence, count: int) -> DraftState:
        """The state of a sequence with the target's present tokens, not yet computed."""
        found = self._states.pop(sequence, None)
        state = self._states[sequence] = found or DraftState.of(sequence)
        state.sync(self._model.vocab_size)
        self._settle(state)
        # The last draft is not computed, so it may lie one position after the context.
        room = self._model.max_model_len - state.known + 1
        state.wanted = 0 if state.out_of_vocabulary else min(count, room)
        return state

    def _settle(self, state: DraftState) -> None:
        """Releases the blocks of rejected drafts and adds full blocks to the prefix cache."""
        own = state.own
        if own.block_table:
            self.kv_cache.truncate(own)
            self.kv_cache.register(own, state.cached, own.num_computed_tokens)
        else:
            self.kv_cache.start(own, self.kv_cache.match_prefix(own))
        state.cached = own.num_computed_tokens

    def _begin_round(self) -> None:
        """Drops finished sequences and resets `wanted` of the others."""
        for sequence, state in list(self._states.items()):
            state.wanted = 0
            if sequence.state is State.FINISHED:
                self.kv_cache.free(state.own)
                del self._states[sequence]

    def _catch_up(self, states: list[DraftState]) -> list[DraftState]:
        """Computes tokens that the draft model has not seen, shortest runs first.

        Returns the states that are up to date and got their first draft.
        """
        budget = self._token_budget
        runs: list[tuple[DraftState, int]] = []
        for state in sorted(states, key=_lag):
            length = min(_lag(state), budget)
            if length == 0:
                break
            runs.append((state, length))
            budget -= length
        begun, tokens = self._clock(), self._token_budget - budget
        live = self._step(runs)
        if tokens >= READING:
            self._reading.observe(self._clock() - begun, tokens)
        return live

    def _step(self, runs: list[tuple[DraftState, int]]) -> list[DraftState]:
        """Computes the given number of tokens of each state, if blocks are free.

        Returns the states that got a draft.
        """
        copies: Copies = []
        scheduled: list[ScheduledSequence] = []
        sampling: list[DraftState] = []
        for state, length in runs:
            own = state.own
            start, end = own.num_computed_tokens, own.num_computed_tokens + length
            if not self._extend(own, end, copies):
                continue
            samples = end == len(own.token_ids)
            scheduled.append(ScheduledSequence(own, start, length, samples))
            if samples:
                sampling.append(state)
        if not scheduled:
            return []
        tokens = sum(item.length for item in scheduled)
        rows = tuple(SampleRow(state.target, state.drafts) for state in sampling)
        found = self._model.execute(SchedulerOutput(tuple(scheduled), tuple(copies), tokens), rows)
        for item in scheduled:
            item.sequence.num_computed_tokens = item.start + item.length
        return [
            state for state, token in zip(sampling, found, strict=True) if _append(state, token)
        ]

    def _extend(self, own: Sequence, end: int, copies: Copies) -> bool:
        """Allocates blocks for a run; evicts sequences that want no drafts in this round."""
        while self.kv_cache.fit(own, end) < end:
            idle = next((each for each in self._states.values() if _evictable(each, own)), None)
            if idle is None:
                return False
            self.kv_cache.free(idle.own)
        self.kv_cache.extend(own, end, copies)
        return True


def _lag(state: DraftState) -> int:
    """Number of tokens that the draft model has not computed; at least 1, the last one."""
    return state.known - state.own.num_computed_tokens


def _evictable(state: DraftState, own: Sequence) -> bool:
    return state.wanted == 0 and state.own is not own and bool(state.own.block_table)


def _append(state: DraftState, token: int | None) -> bool:
    """Appends a draft; returns False if the draft model's logits were broken."""
    if token is not None:
        state.own.token_ids.append(token)
    return token is not None
