"""Checks API keys: if keys are on, every path needs one, except health, version and the document.

Pure ASGI, before the body is read and outside of the framework, so that no route can forget it.
Inner layers never see a key: this removes the headers that carry it.
"""

from collections.abc import Callable, Set

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_common.config.api_keys import MAX_KEY_CHARS, ApiKey

from ..errors import ApiError
from ..limits.tenants import CALLER, Caller
from .body import refusal

OPEN_PATHS = frozenset(
    {"/docs", "/openapi.json", "/health", "/health/live", "/health/ready", "/version"}
)
# OpenAI's clients send the first, Anthropic's the second.
AUTHORIZATION, API_KEY = b"authorization", b"x-api-key"
_CREDENTIALS = frozenset({AUTHORIZATION, API_KEY})

_MESSAGE = (
    "The API key is missing, unknown or expired. Send a valid one as 'Authorization: Bearer KEY'."
)


class Authentication:
    """ASGI middleware. `find` returns the API key of a secret; each refusal calls `refused`.

    Paths in `open_paths` need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        find: Callable[[bytes], ApiKey | None],
        refused: Callable[[], None],
        open_paths: Set[str] = OPEN_PATHS,
    ) -> None:
        self._app = app
        self._find = find
        self._refused = refused
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = CALLER in scope.get("state", {})  # clients cannot set it
        if known or scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        sent = _credentials(scope)
        secret = _secret(sent)
        key = None if secret is None else self._find(secret)
        if key is None:
            self._refused()
            await refusal(_unauthorized(given=bool(sent)))(scope, receive, send)
            return
        scope.setdefault("state", {})[CALLER] = Caller(key)
        rest = [pair for pair in scope["headers"] if pair[0] not in _CREDENTIALS]
        await self._app({**scope, "headers": rest}, receive, send)


def _credentials(scope: Scope) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in scope["headers"] if name in _CREDENTIALS]


def _secret(sent: list[tuple[bytes, bytes]]) -> bytes | None:
    """Returns the secret that was sent; None if none is valid, or if several differ."""
    secrets = {_token(name, value) for name, value in sent}
    if len(secrets) != 1:
        return None
    (secret,) = secrets
    return secret if secret is not None and 0 < len(secret) <= MAX_KEY_CHARS else None


def _token(name: bytes, value: bytes) -> bytes | None:
    if name == API_KEY:
        return value.strip()
    scheme, _, token = value.strip().partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


def _unauthorized(*, given: bool) -> ApiError:
    """Returns the same answer for every fault; with RFC 6750's error code if a key was sent."""
    error = ', error="invalid_token"' if given else ""
    return ApiError(
        401,
        _MESSAGE,
        code="invalid_api_key",
        headers={"www-authenticate": f'Bearer realm="headrace"{error}'},
    )
