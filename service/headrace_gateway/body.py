"""Request bodies before anything reads them: whole, in time, within the limit, not compressed.

Pure ASGI, outside of the framework, so that no route can forget it. Reads the body itself and hands
on one message; what is refused is answered at once in OpenAI's form.
"""

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, invalid

# What is still read and thrown away after a refusal, so that a client that is still writing gets to
# read the answer instead of a reset connection.
LINGER_BYTES = 64 * 2**20
LINGER_SECONDS = 2.0
METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class _Gone(Exception):
    """The client left while its body was being read."""


class BodyLimit:
    """ASGI middleware that reads bodies up to `max_bytes` within `timeout` seconds."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in METHODS_WITH_BODY:
            await self._app(scope, receive, send)
            return
        try:
            self._check_headers(scope)
            async with asyncio.timeout(self._timeout):
                body = await self._read(receive)
        except ApiError as error:
            await _refuse(error, receive, send)
            return
        except TimeoutError:
            slow = ApiError(408, "The request body did not arrive in time.", code="body_timeout")
            await _refuse(slow, receive, send)
            return
        except _Gone:
            return
        await self._app(scope, _replay(body, receive), send)

    def _check_headers(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in (b"", b"identity"):
            raise ApiError(
                415,
                "Compressed request bodies are not accepted; send it without Content-Encoding.",
                code="unsupported_encoding",
            )
        media = headers.get(b"content-type", b"application/json").partition(b";")[0]
        if media.strip().lower() != b"application/json":
            raise ApiError(
                415,
                "The body must be JSON; send Content-Type: application/json.",
                code="unsupported_media_type",
            )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise invalid("Content-Length must be a number.", code="invalid_content_length")
        if int(length[:19]) > self._max_bytes:
            raise self._too_large()

    async def _read(self, receive: Receive) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > self._max_bytes:
                raise self._too_large()
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The request body is over the limit of {self._max_bytes} bytes.",
            code="request_too_large",
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def refusal(error: ApiError) -> ASGIApp:
    """An application that answers every request with this error and ends the connection."""

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await _refuse(error, receive, send)

    return app


async def _refuse(error: ApiError, receive: Receive, send: Send) -> None:
    content = json.dumps(error.body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        (b"connection", b"close"),
        *((name.encode(), value.encode()) for name, value in error.headers.items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": True})
    await _linger(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _linger(receive: Receive) -> None:
    seen = 0
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while seen < LINGER_BYTES:
                message: dict[str, Any] = dict(await receive())
                seen += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
