"""Drafts from a head that reads the target's hidden states (MTP, EAGLE-3).

The runner keeps the head's KV complete after every step, so a draft needs no prefill. Each draft
after the first is one small step of the head.
"""

import time
from collections.abc import Callable
from typing import Protocol

from ..core.request import Sequence
from ..core.step_plan import NO_DRAFTS, Drafts, SampleRow
from .step_cost_model import StepCostModel


class DraftingHead(Protocol):
    """A head, which reads the tokens of every step."""

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether the head has read all tokens of a sequence."""

    def draft(self, rows: list[SampleRow]) -> tuple[int | None, ...]:
        """The next draft of each row, after the drafts in `ahead`. All rows have the same number
        of drafts: none at first, one more at each call. None for a row with broken logits."""


class HeadProposer:
    """Proposes drafts with a head. `clock` returns seconds."""

    def __init__(
        self, head: DraftingHead, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._head, self._clock = head, clock
        self._costs = StepCostModel()

    def step_seconds(self, count: int) -> float | None:
        return self._costs.interpolated(count) if self._costs.is_known else None

    def prefill_seconds(self, sequence: Sequence) -> float:
        return 0.0

    def propose(self, wanted: list[tuple[Sequence, int]]) -> Drafts:
        if not wanted:
            self._costs.skip()
            return NO_DRAFTS
        counts = {each: count for each, count in wanted if self._head.is_ready(each)}
        drafts: dict[Sequence, tuple[int, ...]] = {}
        live = [each for each, count in counts.items() if count > 0]
        while live:
            begun = self._clock()
            found = self._head.draft([SampleRow(each, drafts.get(each, ())) for each in live])
            self._costs.observe(len(live), self._clock() - begun)
            for sequence, token in zip(live, found, strict=True):
                if token is None:
                    counts[sequence] = 0
                else:
                    drafts[sequence] = (*drafts.get(sequence, ()), token)
            live = [each for each in live if len(drafts.get(each, ())) < counts[each]]
        return drafts
