"""Every error as OpenAI clients read it: `{"error": {message, type, param, code}}` and a status.

The only place where failures of the queue and the engine become HTTP. Messages are for the caller:
they name the field, the value and the remedy, never a prompt or an internal address.
"""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from headrace_common.errors import (
    BackendUnavailable,
    FailureCode,
    HeadraceError,
    ImagesFull,
    MessageError,
    QueueFull,
    RequestConflict,
    RequestFailed,
)
from headrace_common.sampling.params import SamplingError
from headrace_common.sealing.sealer import SealingError
from headrace_common.text.chat_template import ChatTemplateError

MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200
INVALID_REQUEST = "invalid_request_error"
TOO_LONG = "context_length_exceeded"
RETRY_SOON_S = 2.0
# Tells OpenAI's and Anthropic's clients not to retry the request by themselves.
NO_RETRY: Mapping[str, str] = {"x-should-retry": "false"}
# The key of a request's state for the id by which its answer identifies it.
REQUEST_NAME = "request_name"
# The type of a validation fault whose value exists elsewhere but is not supported here.
UNSUPPORTED_KIND = "unsupported"
# Parts of a fault's location that are branches of a union, not fields.
_BRANCHES = frozenset({"str", "list", "dict", "allowed"})
# The same, if they follow one of these fields or an item's number and precede a field.
_UNIONS = frozenset({"response_format", "format", "source", "thinking", "tool_choice"})
_KINDS = frozenset(
    {
        *("text", "json_object", "json_schema", "structural_tag"),
        *("image", "thinking", "tool_use", "tool_result"),
        *("base64", "url"),
        *("enabled", "disabled", "adaptive"),
        *("auto", "any", "none", "tool"),
    }
)


class ApiError(Exception):
    """The error that a client gets instead of an answer. `retry_after` is in seconds.

    Parts of the request that it repeats are shortened.
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
        """Returns the same error with another message."""
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
    """Returns the error for a request that can never succeed unchanged."""
    return ApiError(400, message, param=param, code=code)


def too_long(context: int, requested: str, param: str = "messages") -> ApiError:
    """Returns the error for a prompt, or a requested output, that does not fit the model."""
    return ApiError(
        400,
        f"This model's maximum context length is {context} tokens. However, you requested "
        f"{requested}. Shorten the prompt or lower max_tokens.",
        param=param,
        code=TOO_LONG,
    )


def unavailable(message: str, *, code: str, retry_after: float = RETRY_SOON_S) -> ApiError:
    """Returns the error for a valid request that may succeed later."""
    return ApiError(503, message, kind="server_error", code=code, retry_after=retry_after)


def busy(
    message: str, *, code: str, of_tenant: bool, retry_after: float = RETRY_SOON_S
) -> ApiError:
    """Returns the error for a full queue or pool, either of the tenant or of all tenants."""
    if not of_tenant:
        return unavailable(message, code=code, retry_after=retry_after)
    return ApiError(429, message, kind="rate_limit_error", code=code, retry_after=retry_after)


def internal_error(headers: Mapping[str, str] | None = None) -> ApiError:
    """Returns the error for a fault of this server, which only its log describes."""
    message, code = "Internal error.", "internal_error"
    return ApiError(500, message, kind="server_error", code=code, headers=headers)


_FAILURES: Mapping[FailureCode, tuple[int, str]] = {
    FailureCode.DEADLINE: (504, "timeout_error"),
    FailureCode.CANCELLED: (499, "request_cancelled"),
    FailureCode.ABANDONED: (499, "request_cancelled"),
    FailureCode.INVALID: (400, INVALID_REQUEST),
    FailureCode.MALFORMED: (500, "server_error"),
    FailureCode.POISONED: (500, "server_error"),
    FailureCode.REMOVED: (404, INVALID_REQUEST),
    FailureCode.SEALED: (500, "server_error"),
    FailureCode.LOST: (503, "server_error"),
    FailureCode.INTERNAL: (500, "server_error"),
}
# Clients do not need to know what cancelled the request.
_NAMES: Mapping[FailureCode, FailureCode] = {FailureCode.ABANDONED: FailureCode.CANCELLED}
# The same request would fail again: clients that retry on 5xx must not.
_HOPELESS = frozenset(
    {FailureCode.DEADLINE, FailureCode.MALFORMED, FailureCode.POISONED, FailureCode.SEALED}
)

_NOT_OPENED = (
    "The stored data cannot be opened with this server's sealing keys. Send the request again."
)


def to_api_error(error: HeadraceError | SamplingError) -> ApiError:
    """Returns the HTTP error of a failure: the only such mapping."""
    match error:
        case SamplingError():
            return invalid(str(error), param=error.field)
        case RequestFailed():
            return _failed(error)
        case QueueFull():
            return busy(
                str(error),
                code="tenant_queue_full" if error.tenant else error.code,
                of_tenant=error.tenant,
                retry_after=error.retry_after,
            )
        case ImagesFull():
            return busy(str(error), code=error.code, of_tenant=True)
        case ChatTemplateError():
            return invalid(str(error), param="messages", code=error.code)
        case SealingError():
            return _failed(RequestFailed(FailureCode.SEALED, _NOT_OPENED))
        case MessageError():
            return ApiError(413, str(error), code="request_too_large")
        case RequestConflict():
            return ApiError(409, str(error), code=error.code, headers=NO_RETRY)
        case BackendUnavailable():
            return unavailable("The request queue cannot be reached; try again.", code=error.code)
        case _:
            return internal_error()


def _failed(error: RequestFailed) -> ApiError:
    status, kind = _FAILURES[error.failure]
    headers = NO_RETRY if error.failure in _HOPELESS else None
    retry_after = RETRY_SOON_S if error.failure is FailureCode.LOST else None
    return ApiError(
        status,
        str(error),
        kind=kind,
        code=_NAMES.get(error.failure, error.failure).value,
        retry_after=retry_after,
        headers=headers,
    )


def from_validation(error: ValidationError, place: str = "") -> ApiError:
    """Returns the first fault of a body, with OpenAI's form of field names (`messages[0].role`).

    `place` is the place of the checked object in the body.
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
    unknown = (field_path(each["loc"]) for each in faults if each["type"] == "extra_forbidden")
    if first["type"] == "missing" and (typed := next(unknown, "")):
        return invalid(f"{param}: {reason}; '{typed}' is unknown.", param=param)
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return invalid(f"{param}: {reason}{more}" if param else reason, param=param or None)


def _unsupported_kind(param: str, context: Mapping[str, Any]) -> ApiError:
    """Returns the error for an object whose `type`, or similar field, is not supported here."""
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
    """Whether this part of a location names the kind of object that was read."""
    if location[index] not in _KINDS or not 0 < index < len(location) - 1:
        return False
    before = location[index - 1]
    return isinstance(before, int) or before in _UNIONS
