"""Messages for clients whose requests the queue itself ended."""

from ..errors import FailureCode
from ..wire.messages import Failed
from .base import Outcome

# Endings that decide nothing: a gateway that still has the request and its client's answer so far
# may resume it. The same list is in shared.lua.
UNDECIDED = frozenset({FailureCode.LOST, FailureCode.ABANDONED})

# No client wanted the answer any more, or no client seemed to.
CALLED_OFF = frozenset({FailureCode.CANCELLED, FailureCode.ABANDONED})

_TEXTS = {
    FailureCode.DEADLINE: "the request's deadline passed before it was run",
    FailureCode.CANCELLED: "the request was cancelled",
    FailureCode.ABANDONED: "no gateway seemed to want the request",
    FailureCode.POISONED: "the request failed on several engines and is not tried again",
    FailureCode.MALFORMED: "the request could not be read by the engine",
    FailureCode.REMOVED: "the request's model was removed",
    FailureCode.SEALED: "what is stored of the request cannot be opened with this server's keys",
    FailureCode.LOST: "the request's state is lost; send it again",
    FailureCode.INVALID: "the engine refused the request",
    FailureCode.INTERNAL: "the request failed",
}


def failed(request_id: str, attempt: int, failure: FailureCode) -> Failed:
    """The message for a request that ended with this failure code."""
    return Failed(request_id=request_id, attempt=attempt, failure=failure, message=_TEXTS[failure])


def ended_state(outcome: Outcome) -> str:
    """The final state of a request's record for an outcome."""
    if outcome.failed is None:
        return "done"
    return "cancelled" if outcome.failed.failure in CALLED_OFF else "failed"
