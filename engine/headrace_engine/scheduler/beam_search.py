"""Beam search: selects the continuations of beams and the finished hypotheses.

The algorithm is that of transformers' `generate(num_beams=...)`: candidates, length penalty and end
conditions are the same, so the same log probabilities give the same sequences. It handles scores
and tokens; its caller handles sequences and blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Literal, NamedTuple

from ..core.outputs import TokenLogprobs
from .stop_checker import Stop, StopRule

EarlyStopping = bool | Literal["never"]


@dataclass(slots=True, eq=False)
class Beam:
    """An unfinished hypothesis. `logprobs` has an entry for each output token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    score: float = 0.0


class BeamStep(NamedTuple):
    """A continuation: `token` after beam number `parent`. `score` sums its log probabilities."""

    parent: int
    token: int
    score: float
    logprobs: TokenLogprobs
    stop: Stop | None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished hypothesis. `score` is its summed log probability with the length penalty."""

    score: float
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    stop: Stop


class BeamSearch:
    """One search with `width` beams. `rule` decides when a hypothesis ends.

    `early_stopping` is that of transformers. True ends the search once `width` hypotheses are
    finished. False ends it once the best beam, at its present length, scores no better than the
    worst of them; "never" once it cannot score better at any length.
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
        """The number of a beam's most likely tokens to read: enough even if all end tokens are
        among them."""
        ends = len(self._rule.eos_token_ids | self._rule.stop_token_ids)
        return max(2, 1 + ends) * self.width

    def advance(self, beams: Sequence[Beam], offers: Sequence[TokenLogprobs]) -> list[BeamStep]:
        """The continuations to keep, best first; empty once the search is over.

        `offers` has the most likely next tokens of each beam.
        """
        length = len(beams[0].tokens) + 1
        steps = self._best(beams, offers, length)
        for step in steps[: self.width]:
            if step.stop is not None:
                self._finish(beams[step.parent], step, length)
        going = [step for step in steps if step.stop is None][: self.width]
        return [] if not going or self._is_over(going[0].score, length) else going

    def _best(
        self, beams: Sequence[Beam], offers: Sequence[TokenLogprobs], length: int
    ) -> list[BeamStep]:
        every = (
            BeamStep(
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

    def _finish(self, beam: Beam, step: BeamStep, length: int) -> None:
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
        """Whether the search ends; `best` is the score of the best beam, of `length` tokens."""
        if len(self.finished) < self.width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0.0:
            length = self._rule.max_output
        reachable: float = best / length**self._length_penalty
        return reachable <= self.finished[-1].score
