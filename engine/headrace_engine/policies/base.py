"""What a scheduling policy must offer. It only orders; the scheduler decides what fits."""

from typing import ClassVar, Protocol

from ..request import EngineRequest


class Policy(Protocol):
    name: ClassVar[str]

    def key(self, request: EngineRequest, order: int) -> tuple[float, ...]:
        """Sort key of a request, asked once at its arrival: the smaller, the earlier it runs.

        `order` counts the requests that this engine was given; with it a key must be unique.
        """
