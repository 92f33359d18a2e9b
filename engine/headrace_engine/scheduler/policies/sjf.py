"""Shortest job first, by predicted output length, with ageing."""

from typing import ClassVar

from ...core.request import EngineRequest, Sequence
from ..request_queue import Rank
from .base import Policy
from .length_predictor import LengthPredictor, OnlineLengthPredictor
from .options import above_zero, number


class ShortestJobFirst(Policy):
    """Orders requests by size: predicted output tokens of all choices plus weighted prompt tokens.

    Each prompt token adds `prompt_weight`. A second of waiting makes a request `ageing` tokens
    smaller. All requests age equally, so their order never changes. A request of size S is
    overtaken only by requests of a size s that arrive less than (S - s) / ageing seconds after it,
    so none starves.
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
