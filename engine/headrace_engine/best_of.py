"""`best_of`: more choices are sampled than are returned, and the likeliest are kept.

Gathers the outputs of all choices of a request and gives those of the best, once all have ended.
"""

from dataclasses import dataclass, field

from .outputs import SequenceOutput, TokenLogprobs


@dataclass(slots=True)
class _Choice:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: SequenceOutput | None = None

    @property
    def score(self) -> float:
        return sum(entry.logprob for entry in self.logprobs)


class BestOf:
    """`width` choices run, the `count` of the highest summed log probability are the answer.

    `logprobs` is what the request asked for, or None.
    """

    def __init__(self, width: int, count: int, logprobs: int | None) -> None:
        self._choices = [_Choice() for _ in range(width)]
        self._count = count
        self._logprobs = logprobs

    def take(self, output: SequenceOutput) -> list[SequenceOutput]:
        """Takes what a step added to a choice; the answer once this was the last of it."""
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
