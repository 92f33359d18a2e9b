"""Sends the responses that wait for engines, once the framework has returned.

Ends the requests of a response that an endpoint returned and that is never sent.
"""

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ApiError
from ..streaming.disconnecting_response import discard_unsent, take_due
from .error_handlers import error_response


class SendDeferred:
    """ASGI middleware. The innermost one, so that nothing fails between it and the framework."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        try:
            # The framework notes its own objects in the scope; this copy goes with them.
            await self._app({**scope}, receive, send)
            response = take_due(state)
        finally:
            await discard_unsent(state)
        if response is None:
            return
        try:
            await response(scope, receive, send)
        except ApiError as error:
            await error_response(Request(scope), error)(scope, receive, send)
