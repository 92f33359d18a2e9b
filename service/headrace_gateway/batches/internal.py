"""Sends a batch's requests to this gateway's own API: they run the same code as clients' requests,
without a socket. The caller is passed directly, without a key: only code of this process can do
that."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InternalAnswer:
    """`headers` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class InternalClient:
    """Sends requests to an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], state: Mapping[str, Any]
    ) -> InternalAnswer:
        """Returns the whole answer.

        To the application, cancelling looks as if the client had left. `state` passes values that a
        client could not send.
        """
        exchange = _Exchange(body)
        try:
            await self._app(_scope(path, body, headers, state), exchange.receive, exchange.send)
        except Exception:
            if not exchange.begun:
                raise
            logger.exception("batch line failed")  # the application has sent its answer
        return exchange.answer


class _Exchange:
    def __init__(self, body: bytes) -> None:
        self._request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._start: Message = {"status": 500, "headers": []}
        self._body: list[bytes] = []
        self._never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    async def receive(self) -> Message:
        return self._request.pop() if self._request else await asyncio.shield(self._never)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self._body.append(message.get("body", b""))

    @property
    def begun(self) -> bool:
        """Whether the application has answered, even if something failed after that."""
        return bool(self._start["headers"])

    @property
    def answer(self) -> InternalAnswer:
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in self._start["headers"]
        }
        return InternalAnswer(self._start["status"], headers, b"".join(self._body))


def _scope(
    path: str, body: bytes, headers: Mapping[str, str], state: Mapping[str, Any]
) -> dict[str, Any]:
    sent = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "host": "batch",
        **headers,
    }
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items()],
        "client": ("batch", 0),
        "server": ("batch", 0),
        "state": dict(state),
    }
