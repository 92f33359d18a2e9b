"""What is said of a request in log lines, and of one that could not go on."""

from headrace_common.errors import FailureCode
from headrace_common.protocol.base import Outcome
from headrace_common.tracing import carried_trace_id

from .active import ActiveRequest
from .outputs import SequenceOutput


def failure_of(output: SequenceOutput) -> tuple[FailureCode, str]:
    """Of a choice that ended with an error."""
    if output.reason is None:
        return FailureCode.INTERNAL, "the model's output is not finite"
    return FailureCode.INVALID, output.reason


def log_fields(active: ActiveRequest) -> dict[str, object]:
    fields: dict[str, object] = {"request_id": active.request_id, "attempt": active.attempt}
    trace_id = carried_trace_id(active.request.trace)
    return fields if trace_id is None else {**fields, "trace_id": trace_id}


def summary(outcome: Outcome) -> dict[str, object]:
    return {
        "output_tokens": sum(len(choice.token_ids) for choice in outcome.choices),
        "failure": None if outcome.failed is None else outcome.failed.failure.value,
    }
