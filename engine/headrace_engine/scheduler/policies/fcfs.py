"""First come, first served, by arrival in the queue: a request that moves keeps its place."""

from typing import ClassVar

from ...core.request import EngineRequest
from ..request_queue import Rank
from .base import Policy


class Fcfs(Policy):
    name: ClassVar[str] = "fcfs"

    def key(self, request: EngineRequest, order: int) -> Rank:
        return (request.arrival, order)
