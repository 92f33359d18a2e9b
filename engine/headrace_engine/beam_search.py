"""Beam search: which continuations of which beams go on, and which are the answer.

The algorithm is transformers' `generate(num_beams=...)`: the same candidates, length penalty and
ends, so the same sequences for the same log probabilities. It knows scores and tokens; sequences
and their blocks are its caller's.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Literal, NamedTuple

from .outputs import TokenLogprobs
from .stopping import Stop, StopRule

EarlyStopping = bool | Literal["never"]


@dataclass(slots=True, eq=False)
class Beam:
    """A hypothesis that goes on. `logprobs` has an entry for each of its output tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    score: float = 0.0


class Step(NamedTuple):
    """`token` as the next one of beam number `parent`. `score` sums up log probabilities."""

    parent: int
    token: int
    score: float
    logprobs: TokenLogprobs
    stop: Stop | None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished hypothesis. `score` is its summed log probability under the length penalty."""

    score: float
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    stop: Stop


class BeamSearch:
    """One search for `width` beams. `rule` says what ends a hypothesis.

    `early_stopping` as in transformers: True ends with `width` finished hypotheses; False, once the
    best beam as long as it is now could not beat the worst of them; "never", once it could not at
    any length.
    """

    def __init__(
        self, width: int, rule: StopRule, length_penalty: float, early_stopping: EarlyStopping
    ) -> None:
        self.width = width
        self._rule = rule
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self.finished: list[Hypothesis] = []

    @property
    def candidates(self) -> int:
        """The most likely tokens of each beam to look at: enough if all ends are among them."""
        ends = len(self._rule.eos_token_ids | self._rule.stop_token_ids)
        return max(2, 1 + ends) * self.width

    def advance(self, beams: Rows[Beam], offers: Rows[TokenLogprobs]) -> list[Step]:
        """The continuations to go on with, best first; none where the search is over.

        `offers` are the most likely next tokens of each beam.
        """
        length = len(beams[0].tokens) + 1
        steps = self._best(beams, offers, length)
        for step in steps[: self.width]:
            if step.stop is not None:
                self._finish(beams[step.parent], step, length)
        going = [step for step in steps if step.stop is None][: self.width]
        return [] if not going or self._is_over(going[0].score, length) else going

    def _best(self, beams: Rows[Beam], offers: Rows[TokenLogprobs], length: int) -> list[Step]:
        every = (
            Step(
                parent,
                token,
                beam.score + logprob,
                TokenLogprobs(logprob, rank, offer.top),
                self._rule.check(token, length),
            )
            for parent, (beam, offer) in enumerate(zip(beams, offers, strict=True))
            for rank, (token, logprob) in enumerate(offer.top, start=1)
        )
        return nlargest(self.candidates, every, key=lambda step: step.score)

    def _finish(self, beam: Beam, step: Step, length: int) -> None:
        assert step.stop is not None
        hypothesis = Hypothesis(
            step.score / length**self._length_penalty,
            (*beam.tokens, step.token),
            (*beam.logprobs, step.logprobs),
            step.stop,
        )
        ranked = sorted([*self.finished, hypothesis], key=lambda each: -each.score)
        self.finished = ranked[: self.width]

    def _is_over(self, best: float, length: int) -> bool:
        """`best` is the score of the best beam, which has `length` output tokens now."""
        if len(self.finished) < self.width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0.0:
            length = self._rule.max_output
        reachable: float = best / length**self._length_penalty
        return reachable <= self.finished[-1].score
