"""First come, first served: by arrival at the service, so a request that moved keeps its place."""

from typing import ClassVar

from ..request import EngineRequest


class Fcfs:
    name: ClassVar[str] = "fcfs"

    def key(self, request: EngineRequest, order: int) -> tuple[float, ...]:
        return (request.arrival, order)
