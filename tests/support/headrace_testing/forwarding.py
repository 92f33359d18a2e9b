"""Connections that are forwarded to a server: when one side ends, both are closed.

Used by proxies, which define how bytes are copied. Knows nothing about the contents.
"""

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

Passing = asyncio.Task[None]
# Copies in one direction until its reader ends; gets the connection to which it belongs.
Copy = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Passing], Coroutine[Any, Any, None]]


class Forwarder:
    """Forwards connections to the port `target` of 127.0.0.1. `passing` are the open ones."""

    def __init__(self, target: int, copy: Copy) -> None:
        self._target = target
        self._copy = copy
        self._server: asyncio.Server | None = None
        self.passing: set[Passing] = set()

    async def listen(self, port: int = 0, context: ssl.SSLContext | None = None) -> int:
        """Accepts connections, over TLS if there is a `context`; returns the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port, ssl=context)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def refuse(self) -> None:
        """Accepts no more connections."""
        assert self._server is not None, "it listens"
        self._server.close()

    async def cut(self) -> None:
        """Resets all open connections."""
        passing = list(self.passing)
        for connection in passing:
            connection.cancel()
        await asyncio.gather(*passing, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passing = asyncio.create_task(self._pass(reader, writer))
        self.passing.add(passing)
        passing.add_done_callback(partial(self._end, writer))

    def _end(self, writer: asyncio.StreamWriter, passing: Passing) -> None:
        """Closes the connection here and not in the task, because the task may be cancelled before
        it starts."""
        self.passing.discard(passing)
        writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passing = asyncio.current_task()
        assert passing is not None
        with suppress(OSError):  # one of the sides is gone
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            ways = [
                asyncio.create_task(self._copy(reader, far_writer, passing)),
                asyncio.create_task(self._copy(far_reader, writer, passing)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                far_writer.transport.abort()  # first, as a cut may end the wait below
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
