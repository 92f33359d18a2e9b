"""Shortest job first, by the output length that a predictor expects, with ageing."""

from typing import ClassVar

from ..request import EngineRequest, Sequence
from ..waiting import Rank
from .base import Policy
from .length_predictor import LengthPredictor, OnlineLengthPredictor
from .options import above_zero, number


class ShortestJobFirst(Policy):
    """A job's size: expected output tokens of all its choices plus `prompt_weight` a prompt token.

    `ageing`: by how many tokens a second of waiting shortens a job. All age equally, so the order
    of two jobs is fixed once both are there. A job of size S is overtaken only by jobs of a size s
    that arrive less than (S - s) / ageing seconds after it, so none starves.
    """

    name: ClassVar[str] = "sjf"

    def __init__(
        self,
        ageing: float = 5.0,
        prompt_weight: float = 0.05,
        predictor: LengthPredictor | None = None,
    ) -> None:
        self._ageing = above_zero("ageing", ageing)
        self._prompt_weight = number("prompt_weight", prompt_weight)
        self._predictor = predictor or OnlineLengthPredictor()

    def key(self, request: EngineRequest, order: int) -> Rank:
        return (request.arrival + self._size(request) / self._ageing, order)

    def finished(self, sequence: Sequence) -> None:
        self._predictor.learn(sequence.request, sequence.output_length)

    def _size(self, request: EngineRequest) -> float:
        expected = self._predictor.predict(request)
        done = [len(tokens) for tokens in request.resume] or [0] * request.params.n
        output = sum(max(1.0, expected - tokens) for tokens in done)
        return output + self._prompt_weight * len(request.prompt_token_ids)
