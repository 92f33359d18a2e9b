"""What a route asks to be run, and how its answer is made."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response

from headrace_common.sampling import SamplingParams

from .answers import Answer, AnswerOptions
from .kept import View, request_body
from .models import ServedModel
from .output import PLAIN, OutputForm
from .prompt_view import PromptView

# Operations that OpenTelemetry knows under another name than ours.
_MEASURED_AS: Mapping[str, str] = {"responses": "chat", "messages": "chat"}


def accepted(view: View) -> Response:
    """What is said of a request that runs in the background."""
    where = {"location": f"/v1/requests/{view.stored.request_id}"}
    return JSONResponse(request_body(view), 202, headers=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A kind of generation, what makes the body of its answer, and of its acceptance."""

    name: str
    answer: Callable[[AnswerOptions], Answer]
    accepted: Callable[[View], Response] = accepted

    @property
    def measured_as(self) -> str:
        return measured_as(self.name)


def measured_as(operation: str) -> str:
    """The operation's name in metrics and traces."""
    return _MEASURED_AS.get(operation, operation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What to run: `encode` makes the prompts' token ids, which takes time and may be refused.

    `form` is how its output is read. `kept`: it can be read again whether or not it was asked for
    by a header. `shows_ids`: the answer has the token ids, `view` what else it has of the prompts.
    """

    model: ServedModel
    sampling: SamplingParams
    encode: Callable[[], Awaitable[list[list[int]]]]
    form: OutputForm = PLAIN
    include_usage: bool = False
    shows_ids: bool = False
    kept: bool = False
    view: PromptView | None = None
