"""`best_of`: samples more choices than are returned, and returns the most likely ones.

Collects the outputs of all choices of a request until all have ended.
"""

from dataclasses import dataclass, field

from ..core.outputs import SequenceOutput, TokenLogprobs


@dataclass(slots=True)
class _Choice:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: SequenceOutput | None = None

    @property
    def score(self) -> float:
        return sum(entry.logprob for entry in self.logprobs)


class BestOf:
    """Runs `width` choices and returns the `count` with the highest summed log probability.

    `logprobs` is the request's value, or None.
    """

    def __init__(self, width: int, count: int, logprobs: int | None) -> None:
        self._choices = [_Choice() for _ in range(width)]
        self._count = count
        self._logprobs = logprobs

    def take(self, output: SequenceOutput) -> list[SequenceOutput]:
        """Takes what a step added to a choice. Returns the answer once all choices have ended."""
        choice = self._choices[output.choice]
        choice.tokens += output.token_ids
        choice.logprobs += output.logprobs or ()
        if output.finish_reason is not None:
            choice.last = output
        if any(each.last is None for each in self._choices):
            return []
        ranked = sorted(self._choices, key=lambda each: -each.score)[: self._count]
        return [self._answer(number, each) for number, each in enumerate(ranked)]

    def _answer(self, number: int, choice: _Choice) -> SequenceOutput:
        assert choice.last is not None
        return choice.last._replace(
            choice=number,
            index=0,
            token_ids=tuple(choice.tokens),
            logprobs=None if self._logprobs is None else tuple(choice.logprobs),
        )
