"""Reads whole request bodies before a route runs; refuses late, too large and compressed ones.

Begins requests in turn, so that many of one tenant do not delay others.

Pure ASGI, outside of the framework, so that no route can forget it. Passes the body on as one
message; refusals are answered at once in the form of their API.
"""

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_common.config.api_keys import DEFAULT_TENANT

from ..anthropic.errors import body_at
from ..errors import ApiError, invalid
from ..limits.bodies import BodyBuffers, BufferedBody
from ..limits.tenants import caller_of
from ..limits.turns import RequestTurns
from ..streaming.sse import CHANNEL, Channel

# After a refusal, this number of bytes is still read and dropped, for at most this number of
# seconds. So a client that is still writing can read the answer instead of a reset connection.
LINGER_BYTES = 64 * 2**20
LINGER_SECONDS = 2.0
JSON, FORM = "application/json", "multipart/form-data"
UPLOAD_PATHS = frozenset({"/v1/files"})
# The number of large bodies of which one turn of the event loop takes a chunk, and the bytes after
# which a body is large. The other connections are not read meanwhile.
CHUNKS_A_TURN = 2
LARGE_BYTES = 256 * 1024
# The key of the BufferedBody in a request's state.
BUFFERED_BODY = "headrace.buffered_body"
METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class _Gone(Exception):
    """The client left while its body was being read."""


class BodyLimit:
    """ASGI middleware that reads bodies up to `max_bytes` within `timeout` seconds.

    POSTs to UPLOAD_PATHS may be forms and have `max_upload_bytes`.
    """

    def __init__(
        self, app: ASGIApp, *, max_bytes: int, max_upload_bytes: int, timeout: float
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_upload_bytes = max_upload_bytes
        self._timeout = timeout
        self._bodies = BodyBuffers()
        self._chunk_turns = asyncio.Semaphore(CHUNKS_A_TURN)
        self._turns = RequestTurns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in METHODS_WITH_BODY:
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        caller = caller_of(state)
        tenant = DEFAULT_TENANT if caller is None else caller.tenant
        buffered = self._bodies.open(tenant)
        state[BUFFERED_BODY] = buffered
        self._turns.open(tenant)
        try:
            await self._hand_on(scope, receive, send, buffered, tenant)
        finally:
            self._turns.close(tenant)
            buffered.drop()

    async def _hand_on(
        self, scope: Scope, receive: Receive, send: Send, buffered: BufferedBody, tenant: str
    ) -> None:
        try:
            limit, media = self._max_bytes, JSON
            if scope["path"] in UPLOAD_PATHS:
                limit, media = self._max_upload_bytes, FORM
            _check_headers(scope, limit, media)
            async with asyncio.timeout(self._timeout):
                body = await self._read(receive, limit, buffered)
        except ApiError as error:
            buffered.drop()
            await _refuse(error, scope, receive, send)
            return
        except TimeoutError:
            buffered.drop()
            slow = ApiError(408, "The request body did not arrive in time.", code="body_timeout")
            await _refuse(slow, scope, receive, send)
            return
        except _Gone:
            return
        if not self._turns.begin(tenant):
            await self._turns.wait(tenant)
        if _is_reset(scope):
            return
        replayed = _replay(body, receive)
        del body  # which the application may drop once it is read
        await self._app(scope, replayed, send)

    async def _read(self, receive: Receive, limit: int, buffered: BufferedBody) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            chunk: bytes = message.get("body", b"")
            if len(body) + len(chunk) > limit:
                raise _too_large(limit)
            buffered.add(len(chunk))
            more = message.get("more_body", False)
            if not more and not body:
                return chunk
            body += chunk
            if not more:
                return bytes(body)
            if len(body) > LARGE_BYTES:
                async with self._chunk_turns:
                    await asyncio.sleep(0)


def _is_reset(scope: Scope) -> bool:
    """Whether the client of a POST has reset its connection, so that nothing need begin."""
    channel: Channel | None = scope["state"].get(CHANNEL)
    return channel is not None and scope["method"] == "POST" and channel.has_reset


def _check_headers(scope: Scope, limit: int, media: str) -> None:
    headers = dict(scope["headers"])
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"", b"identity"):
        raise ApiError(
            415,
            "Compressed request bodies are not accepted; send it without Content-Encoding.",
            code="unsupported_encoding",
        )
    sent = headers.get(b"content-type", media.encode()).partition(b";")[0]
    if sent.strip().lower() != media.encode():
        what = "JSON" if media == JSON else "a form with a file"
        raise ApiError(
            415,
            f"The body must be {what}; send Content-Type: {media}.",
            code="unsupported_media_type",
        )
    length = headers.get(b"content-length", b"0")
    if not length.isdigit():
        raise invalid("Content-Length must be a number.", code="invalid_content_length")
    if int(length[:19]) > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is over the limit of {limit} bytes.",
        code="request_too_large",
    )


def _replay(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def refusal(error: ApiError) -> ASGIApp:
    """Returns an application that answers every request with this error and closes the
    connection."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await _refuse(error, scope, receive, send)

    return app


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    content = json.dumps(body_at(scope, error)).encode()
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
