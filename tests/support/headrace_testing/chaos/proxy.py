"""A TCP proxy that spoils connections on purpose: latency, slices, cuts, silence, half-open ones.

It runs in a thread with an event loop of its own; all methods may be called from any thread.
"""

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Self, TypeVar

T = TypeVar("T")
_START_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """How bytes travel. `delay` and `jitter` in seconds for each piece; `slice` its most bytes,
    0 for any. `silent`: bytes are held back, connections stay open and new ones are taken."""

    delay: float = 0.0
    jitter: float = 0.0
    slice: int = 0
    silent: bool = False


FAIR = Weather()


class FaultProxy:
    """Listens on `port` of 127.0.0.1 and passes on to `target`, also of 127.0.0.1."""

    def __init__(self, target: int, seed: int = 0) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._weather = FAIR
        self._loop = asyncio.new_event_loop()
        self._clear = asyncio.Event()
        self._passing: set[asyncio.Task[None]] = set()
        self._stranded: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.port = 0

    def start(self) -> Self:
        self._thread.start()
        self._call(self._listen())
        return self

    def stop(self) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def change(self, weather: Weather) -> None:
        """From now on; what was held back goes on its way once it is not silent any more."""
        self._call(self._change(weather))

    def cut(self) -> None:
        """Resets every connection; new ones are taken."""
        self._call(self._cut())

    def strand(self) -> None:
        """Every connection that there is stays open and leads nowhere; new ones are as always."""
        self._call(self._strand())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    async def _listen(self) -> None:
        self._clear.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._cut()

    async def _change(self, weather: Weather) -> None:
        self._weather = weather
        (self._clear.clear if weather.silent else self._clear.set)()

    async def _cut(self) -> None:
        passing = list(self._passing)
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)

    async def _strand(self) -> None:
        self._stranded |= self._passing

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        try:
            await self._pass(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # either side is gone, or cut(): the connection ends here
        finally:
            self._passing.discard(task)
            self._stranded.discard(task)
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        passing = asyncio.current_task()

        def stranded() -> bool:
            return passing in self._stranded

        ways = [
            asyncio.create_task(self._copy(reader, far_writer, stranded)),
            asyncio.create_task(self._copy(far_reader, writer, stranded)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            far_writer.transport.abort()  # first, as a second cancellation may end the wait below
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stranded: Callable[[], bool],
    ) -> None:
        while data := await reader.read(65536):
            for piece in [] if stranded() else self._pieces(data):
                if wait := self._wait():
                    await asyncio.sleep(wait)
                await self._clear.wait()
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)

    def _pieces(self, data: bytes) -> list[bytes]:
        size = self._weather.slice or len(data)
        return [data[start : start + size] for start in range(0, len(data), size)]

    def _wait(self) -> float:
        weather = self._weather
        return weather.delay + weather.jitter * self._random.random()
