"""The interface of scheduling policies: which request is next, preempted or ended.

A policy only orders requests and decides about them; the scheduler decides what fits. One policy
serves one scheduler, in its thread. A policy reads time only from the clock it was made with.
"""

from collections.abc import Iterable
from typing import ClassVar

from ...core.request import EngineRequest, Sequence
from ...core.step_plan import SchedulerOutput
from ..request_queue import Queue, Rank, WaitingQueue


class Policy:
    """Base class of policies. Only `key` is required; the other methods do nothing by default.

    A key is computed once, so waiting sequences are in a heap: O(log n) for each. A policy whose
    order changes while requests wait sets `dynamic` and overrides `queue` and `rank`. A policy that
    lets waiting requests preempt running ones sets `preempts` and overrides `outranks`.
    """

    name: ClassVar[str]
    dynamic: ClassVar[bool] = False
    preempts: ClassVar[bool] = False

    def key(self, request: EngineRequest, order: int) -> Rank:
        """The request's place, computed once at its arrival: smaller keys run earlier.

        `order` numbers the requests of this engine; include it, as keys must be unique.
        """
        raise NotImplementedError

    def queue(self) -> Queue:
        """An empty queue for waiting sequences; called once."""
        return WaitingQueue()

    def rank(self, request: EngineRequest, key: Rank) -> Rank:
        """The present place of a running request; only called if the policy is dynamic."""
        return key

    def outranks(self, waiting: EngineRequest, running: EngineRequest) -> bool:
        """Whether `waiting` may preempt `running`. Only allowed if `running` has the larger key."""
        return False

    def arrived(self, request: EngineRequest) -> None:
        """Called before a new request is queued."""

    def admitted(self, sequence: Sequence, tokens: int) -> None:
        """Called when a sequence starts first; it must compute `tokens` of its known tokens."""

    def stepped(self, scheduler_output: SchedulerOutput) -> None:
        """Called after a step; each of its sequences with `samples` got a token."""

    def finished(self, sequence: Sequence) -> None:
        """Called when a choice ended by a stop token or by its length."""

    def gone(self, request: EngineRequest) -> None:
        """Called when no choice of the request is left, for any reason."""

    def expired(self) -> Iterable[tuple[str, str]]:
        """Ids of requests to end now, with the reason; called before each step."""
        return ()

    def refusal(self, sequence: Sequence, tokens: int) -> str | None:
        """The reason to refuse the first request in the queue, which has not run yet, or None.

        It would have to compute `tokens` of its known tokens. A refused request ends.
        """
        return None
