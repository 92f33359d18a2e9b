"""Operations that a route asks the pipeline to run."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response

from headrace_common.sampling.params import SamplingParams

from ..models.models import ServedModel
from ..openai.prompt_echo_options import PromptEchoOptions
from ..parsing.output import PLAIN, OutputForm
from ..resumable.stored_requests import RequestSnapshot, request_body
from .prompts import Prompt

# Operations that have another name in OpenTelemetry.
_MEASURED_AS: Mapping[str, str] = {"responses": "chat", "messages": "chat"}


def background_response(snapshot: RequestSnapshot) -> Response:
    """Returns the response to a request that runs in the background."""
    where = {"location": f"/v1/requests/{snapshot.stored.request_id}"}
    return JSONResponse(request_body(snapshot), 202, headers=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A kind of generation. `accepted` makes the response to one that runs in the background."""

    name: str
    accepted: Callable[[RequestSnapshot], Response] = background_response


def measured_as(operation: str) -> str:
    """Returns the operation's name in metrics and traces."""
    return _MEASURED_AS.get(operation, operation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An operation to run.

    `encode` makes the prompts; it takes time, and raises an error for a prompt that is refused.
    `form` says how the output is parsed. With `stored`, the request is stored even without a header
    that asks for it. With `shows_ids`, the answer has the token ids. `prompt_echo` says which other
    data of the prompts it has.
    """

    model: ServedModel
    sampling: SamplingParams
    encode: Callable[[], Awaitable[list[Prompt]]]
    form: OutputForm = PLAIN
    include_usage: bool = False
    shows_ids: bool = False
    stored: bool = False
    prompt_echo: PromptEchoOptions | None = None
