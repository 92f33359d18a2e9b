"""The live data as server-sent events to one console."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..queue_client.drain import Drain
from ..streaming.disconnecting_response import disconnected, stop
from ..streaming.sse import HEADERS, Writer, encode
from .live_feed import LiveFeed
from .live_view import LiveView

Content = Callable[[LiveView], dict[str, Any]]


class LiveStream(Response):
    """Sends `events` snapshots, or snapshots until the client leaves or this gateway drains.

    `content` makes an event's content for this watcher. A client that does not read for
    `write_timeout` seconds is dropped.
    """

    def __init__(
        self,
        feed: LiveFeed,
        tenant: str,
        content: Content,
        *,
        events: int | None,
        write_timeout: float,
        drain: Drain,
    ) -> None:
        super().__init__()
        self._feed = feed
        self._tenant = tenant
        self._content = content
        self._events = events
        self._write_timeout = write_timeout
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.watching(self._tenant):
            writer = Writer(scope, send, self._write_timeout)
            work = asyncio.create_task(self._send_events(writer))
            gone = asyncio.create_task(disconnected(receive))
            try:
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            finally:
                await stop(work, gone)
                writer.close()

    async def _send_events(self, writer: Writer) -> None:
        await writer.start(200, HEADERS)
        version, sent = 0, 0
        while not self._drain.draining:
            version, view = await self._feed.after(version)
            sent += 1
            last = sent == self._events
            event = b"event: snapshot\ndata: %b\n\n" % encode(self._content(view))
            await writer.body(event, more=not last)
            if last:
                return
        await writer.body(b"", more=False)
