"""What a scheduling policy decides: who is next, and what must give way or end.

It only orders and judges; the scheduler decides what fits and keeps the books. One policy serves
one scheduler, in its thread. Time comes from the clock that a policy is made with.
"""

from collections.abc import Iterable
from typing import ClassVar

from ..plan import StepPlan
from ..request import EngineRequest, Sequence
from ..waiting import Queue, Rank, WaitingQueue


class Policy:
    """`key` is all that a policy needs; the other methods do nothing unless overridden.

    Keys are asked once, so waiting sequences lie in a heap: O(log n) each, whatever the number.
    A policy whose order changes while requests wait is `dynamic`: it then overrides `queue` and
    `rank`. One that `preempts` overrides `outranks`.
    """

    name: ClassVar[str]
    dynamic: ClassVar[bool] = False
    preempts: ClassVar[bool] = False

    def key(self, request: EngineRequest, order: int) -> Rank:
        """The request's place, asked once at its arrival: the smaller, the earlier it runs.

        `order` counts the requests that this engine was given; with it a key must be unique.
        """
        raise NotImplementedError

    def queue(self) -> Queue:
        """An empty queue for the sequences that wait; asked once."""
        return WaitingQueue()

    def rank(self, request: EngineRequest, key: Rank) -> Rank:
        """The place of a running request now; asked of a dynamic policy in the place of `key`."""
        return key

    def outranks(self, waiting: EngineRequest, running: EngineRequest) -> bool:
        """Whether `waiting` may preempt `running`, which must have the larger key."""
        return False

    def arrived(self, request: EngineRequest) -> None:
        """A new request is about to be queued."""

    def admitted(self, sequence: Sequence, tokens: int) -> None:
        """A sequence starts for the first time and must compute `tokens` of those it knows."""

    def stepped(self, plan: StepPlan) -> None:
        """A step is over; each of its sequences with `samples` got a token."""

    def finished(self, sequence: Sequence) -> None:
        """A choice came to its own end: a stop token or its length."""

    def gone(self, request: EngineRequest) -> None:
        """No choice of the request is left, for whatever reason."""

    def expired(self) -> Iterable[tuple[str, str]]:
        """Ids of requests to end now, with the reason; asked before each step."""
        return ()

    def refusal(self, sequence: Sequence, tokens: int) -> str | None:
        """Why not to start what is first in the queue and has not run yet, or None.

        It would have to compute `tokens` of those it knows. A refused request ends.
        """
        return None
