"""First come, first served: by arrival at the service, so a request that moved keeps its place."""

from typing import ClassVar

from ..request import EngineRequest
from ..waiting import Rank
from .base import Policy


class Fcfs(Policy):
    name: ClassVar[str] = "fcfs"

    def key(self, request: EngineRequest, order: int) -> Rank:
        return (request.arrival, order)
