"""Drafts from a draft model: one token of every sequence a step, in batches, over paged KV.

The draft model samples with the request's own parameters and the same random number that the
target will use at that position, so that both choose the same token wherever their distributions
agree well enough.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..kv_cache import Copies, KVCache
from ..phase_costs import Rate
from ..plan import NO_DRAFTS, Drafts, SampleRow, ScheduledSequence, StepPlan
from ..request import Sequence, State
from .costs import DISCOUNT, MEMORY, StepCosts

# From so many tokens of a step on its seconds tell what reading a token costs.
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

    def execute(self, plan: StepPlan, rows: tuple[SampleRow, ...]) -> tuple[int | None, ...]:
        """Computes the plan's runs and samples a token for each that asks, as `rows` says; None
        where the logits are broken."""


@dataclass(slots=True, eq=False)
class Shadow:
    """A sequence of the target, and `own`: the same with the draft model's KV.

    `own` has `known` tokens of the target and behind them the drafts.
    `wanted` counts the drafts that this round is to give. The full blocks below `cached` are in the
    prefix cache. A `foreign` one has a token that the draft model does not know: it gives none.
    """

    target: Sequence
    own: Sequence
    known: int = 0
    wanted: int = 0
    cached: int = 0
    foreign: bool = False

    @classmethod
    def of(cls, sequence: Sequence) -> "Shadow":
        return cls(sequence, Sequence(sequence.request, sequence.choice, []))

    @property
    def drafts(self) -> tuple[int, ...]:
        return tuple(self.own.token_ids[self.known :])

    def sync(self, vocab_size: int) -> None:
        """Takes over the target's tokens; of the drafts stays what turned out to be right."""
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
        # The last token is run again if nothing is new: drafts follow its logits.
        own.computed = min(own.computed, right_end, self.known - 1)
        self.foreign |= max(new, default=0) >= vocab_size


class DraftModelProposer:
    """Has the KV blocks of the draft model. `token_budget` is the most tokens of one of its steps.

    A sequence that it has not seen is prefilled first, which may take several rounds; one for which
    there are no blocks gets no drafts. `clock` counts seconds.
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
        self._kv = KVCache(model.num_blocks, model.block_size, prefix_caching)
        # In the order of their last use.
        self._shadows: dict[Sequence, Shadow] = {}
        self._costs, self._reading, self._rests = StepCosts(), Rate(), 0

    def step_seconds(self, count: int) -> float | None:
        """By the nearest known steps, and no less than so many tokens of a prompt cost."""
        if not self._costs.is_known:
            return None
        return max(self._costs.nearest(count), self._reading.of(count))

    def entry_seconds(self, sequence: Sequence) -> float:
        shadow = self._shadows.get(sequence)
        seen = 0 if shadow is None else shadow.own.computed
        return self._reading.of(max(0, len(sequence.token_ids) - 1 - seen))

    @property
    def kv_cache(self) -> KVCache:
        return self._kv

    def propose(self, wanted: list[tuple[Sequence, int]]) -> Drafts:
        self._begin_round()
        if not wanted:
            self._rest()
            return NO_DRAFTS
        shadows = {sequence: self._shadow(sequence, count) for sequence, count in wanted}
        asked = [shadow for shadow in shadows.values() if shadow.wanted > 0]
        live = self._catch_up(asked)
        while live := [shadow for shadow in live if len(shadow.drafts) < shadow.wanted]:
            begun, count = self._clock(), len(live)
            live = self._step([(shadow, 1) for shadow in live])
            self._costs.observe(count, self._clock() - begun)
        found = {sequence: shadow.drafts for sequence, shadow in shadows.items()}
        return {sequence: drafts for sequence, drafts in found.items() if drafts}

    def _rest(self) -> None:
        """What is not measured is believed to become cheaper, so that it is tried again."""
        self._costs.rest()
        self._rests += 1
        if self._rests % MEMORY == 0:
            self._reading.scale(DISCOUNT)

    def _shadow(self, sequence: Sequence, count: int) -> Shadow:
        """What the draft model has of a sequence, brought up to date but not yet computed."""
        found = self._shadows.pop(sequence, None)
        shadow = self._shadows[sequence] = found or Shadow.of(sequence)
        shadow.sync(self._model.vocab_size)
        self._settle(shadow)
        # The last draft is not run, so it may lie one position behind the context.
        room = self._model.max_model_len - shadow.known + 1
        shadow.wanted = 0 if shadow.foreign else min(count, room)
        return shadow

    def _settle(self, shadow: Shadow) -> None:
        """Gives back the blocks of rejected drafts; accepted ones go into the prefix cache."""
        own = shadow.own
        if own.block_table:
            self._kv.truncate(own)
            self._kv.register(own, shadow.cached, own.computed)
        else:
            self._kv.start(own, self._kv.match_prefix(own))
        shadow.cached = own.computed

    def _begin_round(self) -> None:
        """Drops finished sequences; nobody has asked for the others yet."""
        for sequence, shadow in list(self._shadows.items()):
            shadow.wanted = 0
            if sequence.state is State.FINISHED:
                self._kv.free(shadow.own)
                del self._shadows[sequence]

    def _catch_up(self, shadows: list[Shadow]) -> list[Shadow]:
        """Runs what the draft model has not seen yet, least first, and the first drafts of those
        that are through."""
        budget = self._token_budget
        runs: list[tuple[Shadow, int]] = []
        for shadow in sorted(shadows, key=_lag):
            length = min(_lag(shadow), budget)
            if length == 0:
                break
            runs.append((shadow, length))
            budget -= length
        begun, tokens = self._clock(), self._token_budget - budget
        live = self._step(runs)
        if tokens >= READING:
            self._reading.observe(self._clock() - begun, tokens)
        return live

    def _step(self, runs: list[tuple[Shadow, int]]) -> list[Shadow]:
        """Runs so many tokens of each, as far as there are blocks; those that got a draft."""
        copies: Copies = []
        scheduled: list[ScheduledSequence] = []
        sampling: list[Shadow] = []
        for shadow, length in runs:
            own = shadow.own
            start, end = own.computed, own.computed + length
            if not self._extend(own, end, copies):
                continue
            samples = end == len(own.token_ids)
            scheduled.append(ScheduledSequence(own, start, length, samples))
            if samples:
                sampling.append(shadow)
        if not scheduled:
            return []
        tokens = sum(item.length for item in scheduled)
        rows = tuple(SampleRow(shadow.target, shadow.drafts) for shadow in sampling)
        found = self._model.execute(StepPlan(tuple(scheduled), tuple(copies), tokens), rows)
        for item in scheduled:
            item.sequence.computed = item.start + item.length
        return [
            shadow for shadow, token in zip(sampling, found, strict=True) if _append(shadow, token)
        ]

    def _extend(self, own: Sequence, end: int, copies: Copies) -> bool:
        """Makes room for a run, at the cost of sequences that this round does not ask for."""
        while self._kv.fit(own, end) < end:
            idle = next((each for each in self._shadows.values() if _evictable(each, own)), None)
            if idle is None:
                return False
            self._kv.free(idle.own)
        self._kv.extend(own, end, copies)
        return True


def _lag(shadow: Shadow) -> int:
    """Tokens that the draft model has not seen yet; at least 1, as drafts follow the last one."""
    return shadow.known - shadow.own.computed


def _evictable(shadow: Shadow, own: Sequence) -> bool:
    return shadow.wanted == 0 and shadow.own is not own and bool(shadow.own.block_table)


def _append(shadow: Shadow, token: int | None) -> bool:
    """Takes a draft in; false where the draft model's logits were broken."""
    if token is not None:
        shadow.own.token_ids.append(token)
    return token is not None
