"""Lower priority numbers first, with ageing: waiting compensates for a high number."""

from typing import ClassVar

from ...core.request import EngineRequest
from ..request_queue import Rank
from .base import Policy
from .options import above_zero


class Priority(Policy):
    """Orders requests by priority, where `ageing` seconds of waiting are worth one level.

    All requests age equally, so their order never changes and the key is
    `arrival + ageing * priority`. A request of priority p is overtaken only by requests of a lower
    number q that arrive less than (p - q) * ageing seconds after it, so none starves. With
    `preemption` a request may preempt running ones of a higher number, within the same bound.
    """

    name: ClassVar[str] = "priority"
    preempts: ClassVar[bool] = True

    def __init__(self, ageing: float = 60.0, preemption: bool = True) -> None:
        self._ageing = above_zero("ageing", ageing)
        self._preemption = preemption

    def key(self, request: EngineRequest, order: int) -> Rank:
        return (self._due(request), order)

    def outranks(self, waiting: EngineRequest, running: EngineRequest) -> bool:
        return (
            self._preemption
            and waiting.priority < running.priority
            and self._due(waiting) < self._due(running)
        )

    def _due(self, request: EngineRequest) -> float:
        return request.arrival + self._ageing * request.priority
