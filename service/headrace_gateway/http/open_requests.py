"""Refuses requests of tenants that have too many open ones, before their bodies are read."""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ApiError
from ..limits.open_requests import OpenRequests
from ..limits.tenants import batch_of, caller_of
from .body import refusal


class OpenRequestLimit:
    """ASGI middleware inside of the authentication. Each refusal calls `refused` with the tenant.

    Requests of batches do not count: they have no connection and a limit of their own.
    """

    def __init__(self, app: ASGIApp, *, most: int, refused: Callable[[str], None]) -> None:
        self._app = app
        self._refused = refused
        self._open = OpenRequests(most)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        caller = caller_of(state)
        if caller is None or batch_of(state) is not None:
            await self._app(scope, receive, send)
            return
        tenant = caller.tenant
        try:
            self._open.begin(tenant)
        except ApiError as error:
            self._refused(tenant)
            await refusal(error)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._open.end(tenant)
