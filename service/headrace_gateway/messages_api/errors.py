"""Errors as Anthropic's clients read them: `{"type": "error", "error": {type, message}}`; and the
header in which they look for a request's name.
"""

from collections.abc import Mapping
from typing import Any

from ..errors import ApiError

PATH = "/v1/messages"

_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def body_at(path: str, error: ApiError) -> dict[str, Any]:
    """The error's body in the form of the API that the path is of."""
    return anthropic_error(error) if _is_anthropics(path) else error.body


def named_at(path: str, name: str) -> dict[str, str]:
    """The headers that tell clients a request's name, by which logs have it."""
    named = {"x-request-id": name}
    return {**named, "request-id": name} if _is_anthropics(path) else named


def _is_anthropics(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")
