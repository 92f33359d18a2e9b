"""Every error as OpenAI clients read it: `{"error": {message, type, param, code}}` and a status.

The only place where failures of the queue and the engine become HTTP. Messages are for the caller:
they name the field, the value and what to do, never a prompt or an internal address.
"""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from headrace_common.chat_template import ChatTemplateError
from headrace_common.errors import (
    BackendUnavailable,
    FailureCode,
    HeadraceError,
    MessageError,
    QueueFull,
    RequestConflict,
    RequestFailed,
)
from headrace_common.sampling import SamplingError

MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200
INVALID_REQUEST = "invalid_request_error"
TOO_LONG = "context_length_exceeded"
RETRY_SOON_S = 2.0
# Where a request's state has the name that its answer tells, once it has one.
REQUEST_NAME = "request_name"
# How a body's validation says that a value is known, but not to this server.
UNSUPPORTED_KIND = "unsupported"
# Parts of a fault's location that are a union's branches, not fields.
_BRANCHES = frozenset({"str", "list", "dict", "allowed"})
# Likewise, where they stand behind these fields or an item's number, and before a field.
_UNIONS = frozenset({"response_format", "format", "thinking", "tool_choice"})
_KINDS = frozenset(
    {
        *("text", "json_object", "json_schema", "structural_tag"),
        *("thinking", "tool_use", "tool_result"),
        *("enabled", "disabled", "adaptive"),
        *("auto", "any", "none", "tool"),
    }
)


class ApiError(Exception):
    """What a client is told instead of an answer. `retry_after` is in seconds.

    Whatever of a request is repeated in it, it stays short.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = _cut(message, MAX_MESSAGE_CHARS)
        super().__init__(self.message)
        self.kind = kind
        self.code = code
        self.param = None if param is None else _cut(param, MAX_PARAM_CHARS)
        self.retry_after = retry_after
        self._headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def renamed(self, message: str, param: str | None) -> "ApiError":
        """The same error in other words."""
        return ApiError(
            self.status,
            message,
            kind=self.kind,
            code=self.code,
            param=param,
            retry_after=self.retry_after,
            headers=self._headers,
        )

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after is None:
            return self._headers
        return {**self._headers, "retry-after": str(max(1, math.ceil(self.retry_after)))}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that can never succeed as it is."""
    return ApiError(400, message, param=param, code=code)


def too_long(context: int, requested: str, param: str = "messages") -> ApiError:
    """The prompt, or what it asks for, does not fit the model."""
    return ApiError(
        400,
        f"This model's maximum context length is {context} tokens. However, you requested "
        f"{requested}. Shorten the prompt or lower max_tokens.",
        param=param,
        code=TOO_LONG,
    )


def unavailable(message: str, *, code: str, retry_after: float = RETRY_SOON_S) -> ApiError:
    """Nothing wrong with the request: it may succeed later."""
    return ApiError(503, message, kind="server_error", code=code, retry_after=retry_after)


_FAILURES: Mapping[FailureCode, tuple[int, str]] = {
    FailureCode.DEADLINE: (504, "timeout_error"),
    FailureCode.CANCELLED: (499, "request_cancelled"),
    FailureCode.ABANDONED: (499, "request_cancelled"),
    FailureCode.INVALID: (400, INVALID_REQUEST),
    FailureCode.MALFORMED: (500, "server_error"),
    FailureCode.POISONED: (500, "server_error"),
    FailureCode.LOST: (503, "server_error"),
    FailureCode.INTERNAL: (500, "server_error"),
}
# For a client it is the same who had called it off.
_NAMES: Mapping[FailureCode, FailureCode] = {FailureCode.ABANDONED: FailureCode.CANCELLED}
# The same request would fail again: clients that retry on 5xx are told not to.
_HOPELESS = frozenset({FailureCode.DEADLINE, FailureCode.MALFORMED, FailureCode.POISONED})


def to_api_error(error: HeadraceError | SamplingError) -> ApiError:
    """The one mapping of failures to HTTP."""
    match error:
        case SamplingError():
            return invalid(str(error), param=error.field)
        case RequestFailed():
            return _failed(error)
        case QueueFull():
            return _full(error)
        case ChatTemplateError():
            return invalid(str(error), param="messages", code=error.code)
        case MessageError():
            return ApiError(413, str(error), code="request_too_large")
        case RequestConflict():
            return ApiError(409, str(error), code=error.code, headers={"x-should-retry": "false"})
        case BackendUnavailable():
            return unavailable("The request queue cannot be reached; try again.", code=error.code)
        case _:
            return ApiError(500, "Internal error.", kind="server_error", code="internal_error")


def _failed(error: RequestFailed) -> ApiError:
    status, kind = _FAILURES[error.failure]
    headers = {"x-should-retry": "false"} if error.failure in _HOPELESS else None
    retry_after = RETRY_SOON_S if error.failure is FailureCode.LOST else None
    return ApiError(
        status,
        str(error),
        kind=kind,
        code=_NAMES.get(error.failure, error.failure).value,
        retry_after=retry_after,
        headers=headers,
    )


def _full(error: QueueFull) -> ApiError:
    if error.tenant:
        return ApiError(
            429,
            str(error),
            kind="rate_limit_error",
            code="tenant_queue_full",
            retry_after=error.retry_after,
        )
    return unavailable(str(error), code=error.code, retry_after=error.retry_after)


def from_validation(error: ValidationError, place: str = "") -> ApiError:
    """The first fault of a body, named as OpenAI names fields (`messages[0].role`).

    `place` is where in the body the object is that was checked.
    """
    faults = error.errors(include_url=False, include_input=False)
    first = faults[0]
    param = ".".join(filter(None, (place, field_path(first["loc"]))))
    if first["type"] == "extra_forbidden":
        message = f"Unknown field: '{param}'. Remove it."
        return invalid(message, param=param, code="unknown_parameter")
    if first["type"] == UNSUPPORTED_KIND:
        return invalid(f"{param}: {first['msg']}.", param=param, code="unsupported_parameter")
    if first["type"] == "union_tag_invalid":
        return _unsupported_kind(param, first["ctx"])
    reason = first["msg"].removeprefix("Value error, ")
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return invalid(f"{param}: {reason}{more}" if param else reason, param=param or None)


def _unsupported_kind(param: str, context: Mapping[str, Any]) -> ApiError:
    """For an object whose field `type`, or the like, says that it is none of those known here."""
    param = f"{param}.{context['discriminator'].strip(chr(39))}"
    known = context["expected_tags"].replace("'", "")
    message = f"{param}: '{context['tag'][:80]}' is not supported; known are {known}."
    return invalid(message, param=param, code="unsupported_parameter")


def field_path(location: tuple[int | str, ...]) -> str:
    path = ""
    for index, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
        elif len(part) > MAX_PARAM_CHARS:
            path += f".{part[:MAX_PARAM_CHARS]}" if path else part[:MAX_PARAM_CHARS]
        elif part.isidentifier() and part not in _BRANCHES and not _is_kind(location, index):
            path += f".{part}" if path else part
    return path


def _is_kind(location: tuple[int | str, ...], index: int) -> bool:
    """Whether this part says which of several kinds of objects was read."""
    if location[index] not in _KINDS or not 0 < index < len(location) - 1:
        return False
    before = location[index - 1]
    return isinstance(before, int) or before in _UNIONS
