"""Earliest deadline first. Refuses requests that cannot finish in time, and ends late ones."""

from collections.abc import Callable, Iterable
from math import inf
from time import monotonic
from typing import ClassVar

from ...core.request import EngineRequest, Sequence
from ...core.step_plan import SchedulerOutput
from ..request_queue import LazyHeap, Rank
from .base import Policy
from .options import above_zero, number


class Deadline(Policy):
    """Orders requests by deadline, in seconds of `clock`.

    A request ends `margin` seconds before its deadline, so that its partial text reaches the client
    before the gateway ends the request. A request that has not run yet is refused if even its
    shortest output, at the best recent speed, would be too late. A request without a deadline is
    placed as if it had `horizon` seconds, so that it does not starve; it is never ended early.
    """

    name: ClassVar[str] = "deadline"

    def __init__(
        self, margin: float = 0.25, horizon: float = 600.0, clock: Callable[[], float] = monotonic
    ) -> None:
        self._margin = number("margin", margin)
        self._horizon = above_zero("horizon", horizon)
        self._clock = clock
        self._ends: LazyHeap[Rank, str] = LazyHeap()
        self._count = 0
        self._now = clock()
        self._speed = BestSpeed()

    def key(self, request: EngineRequest, order: int) -> Rank:
        return (min(request.deadline, request.arrival + self._horizon), order)

    def arrived(self, request: EngineRequest) -> None:
        if request.deadline < inf:
            self._count += 1
            self._ends.push((self._end(request), self._count), request.request_id)

    def gone(self, request: EngineRequest) -> None:
        self._ends.discard(request.request_id)

    def expired(self) -> Iterable[tuple[str, str]]:
        self._now = self._clock()
        while (key := self._ends.peek_key()) is not None and key[0] <= self._now:
            yield self._ends.pop(), "its deadline is over"

    def stepped(self, scheduler_output: SchedulerOutput) -> None:
        self._speed.observe(scheduler_output, self._clock() - self._now)

    def refusal(self, sequence: Sequence, tokens: int) -> str | None:
        left = self._end(sequence.request) - self._now
        needed = self._speed.seconds(tokens, least_output(sequence) - 1)
        if needed <= left:
            return None
        return (
            f"its deadline is in {max(0.0, left):.2f} s, but its {tokens} prompt tokens and "
            f"shortest output take at least {needed:.2f} s: it was not begun"
        )

    def _end(self, request: EngineRequest) -> float:
        return request.deadline - self._margin


def least_output(sequence: Sequence) -> int:
    """The fewest further tokens with which the output can end, at least 1."""
    params = sequence.request.params
    least = params.min_tokens + 1
    if params.max_tokens is not None:
        free_to_end = not params.ignore_eos or params.stop_token_ids
        least = min(least, params.max_tokens) if free_to_end else params.max_tokens
    return max(1, least - sequence.output_length)


class BestSpeed:
    """The best recent speeds: each observation makes the stored ones 1 % slower."""

    FADE = 1.01

    def __init__(self) -> None:
        self._step = 0.0
        self._token = 0.0

    def observe(self, scheduler_output: SchedulerOutput, seconds: float) -> None:
        if seconds <= 0.0:
            return
        if all(item.length == 1 for item in scheduler_output.scheduled):
            most = 1 + max(
                len(item.drafts) for item in scheduler_output.scheduled
            )  # seconds for tokens of one sequence
            self._step = min(self._step * self.FADE or inf, seconds / most)
        else:
            self._token = min(self._token * self.FADE or inf, seconds / scheduler_output.num_tokens)

    def seconds(self, prompt_tokens: int, steps: int) -> float:
        """The least time for prompt tokens and the steps after them; 0 if nothing is known."""
        return prompt_tokens * self._token + steps * self._step
