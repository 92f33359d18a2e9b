"""Ends the requests of responses that an endpoint returned but the framework did not send."""

from starlette.types import ASGIApp, Receive, Scope, Send

from ..streaming.disconnecting_response import discard_unsent


class DiscardUnsent:
    """ASGI middleware. The innermost one, so that nothing fails between it and the framework."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            await discard_unsent(scope.get("state", {}))
