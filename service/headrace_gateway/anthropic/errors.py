"""Errors in Anthropic's form: `{"type": "error", "error": {type, message}}`, and the headers that
identify Anthropic's clients and their requests."""

from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from ..errors import ApiError

PATH = "/v1/messages"
# Paths of both APIs; Anthropic's clients send this header with every request.
SHARED_PATHS = ("/v1/models", "/v1/files")
VERSION_HEADER = b"anthropic-version"

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


def body_at(scope: Scope, error: ApiError) -> dict[str, Any]:
    """Returns the error's body in the form of the API at this path."""
    return anthropic_error(error) if is_anthropics(scope) else error.body


def named_at(scope: Scope, name: str) -> dict[str, str]:
    """Returns the headers that tell clients the request's id, which is also in the logs."""
    named = {"x-request-id": name}
    return {**named, "request-id": name} if is_anthropics(scope) else named


def is_anthropics(scope: Scope) -> bool:
    """Whether a request is for Anthropic's API."""
    path = scope["path"]
    if _is_below(path, PATH):
        return True
    if not any(_is_below(path, shared) for shared in SHARED_PATHS):
        return False
    return any(name == VERSION_HEADER for name, _ in scope["headers"])


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")
