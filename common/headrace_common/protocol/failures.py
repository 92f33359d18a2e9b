"""What a client is told about requests that the queue itself ended."""

from ..errors import FailureCode
from ..messages import Failed
from .base import Outcome

# Endings by which nothing was decided: a gateway that has the request, and what its client was
# told, may have it go on; as in shared.lua.
UNDECIDED = frozenset({FailureCode.LOST, FailureCode.ABANDONED})

# Nobody wanted the answer any more, or seemed to.
CALLED_OFF = frozenset({FailureCode.CANCELLED, FailureCode.ABANDONED})

_TEXTS = {
    FailureCode.DEADLINE: "the request's deadline passed before it was run",
    FailureCode.CANCELLED: "the request was cancelled",
    FailureCode.ABANDONED: "no gateway seemed to want the request",
    FailureCode.POISONED: "the request failed on several engines and is not tried again",
    FailureCode.MALFORMED: "the request could not be read by the engine",
    FailureCode.LOST: "the request's state is lost; send it again",
    FailureCode.INVALID: "the engine refused the request",
    FailureCode.INTERNAL: "the request failed",
}


def failed(request_id: str, attempt: int, failure: FailureCode) -> Failed:
    """The message for a request that ended so."""
    return Failed(request_id=request_id, attempt=attempt, failure=failure, message=_TEXTS[failure])


def ended_state(outcome: Outcome) -> str:
    """The record's last state for an outcome."""
    if outcome.failed is None:
        return "done"
    return "cancelled" if outcome.failed.failure in CALLED_OFF else "failed"
