"""A TCP proxy that disturbs connections: it delays, slices and cuts them, falls silent, or leaves
them half open.

It runs in a thread with an event loop of its own; all methods may be called from any thread.
"""

import asyncio
import random
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from weakref import WeakSet

from headrace_testing.forwarding import Forwarder, Passing

T = TypeVar("T")
_START_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """How bytes travel.

    `delay` and `jitter` are seconds for each piece; `slice` is the most bytes of a piece, 0 for any
    number. If `silent`, bytes are held back, connections stay open and new ones are accepted.
    """

    delay: float = 0.0
    jitter: float = 0.0
    slice: int = 0
    silent: bool = False


FAIR = Weather()


class FaultProxy:
    """Listens on `port` of 127.0.0.1 and forwards to `target`, also on 127.0.0.1."""

    def __init__(self, target: int, seed: int = 0) -> None:
        self._forwarder = Forwarder(target, self._copy)
        self._random = random.Random(seed)
        self._weather = FAIR
        self._loop = asyncio.new_event_loop()
        self._clear = asyncio.Event()
        self._stranded: WeakSet[Passing] = WeakSet()
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
        """Changes the weather from now on; bytes that were held back are sent when the silence
        ends."""
        self._call(self._change(weather))

    def cut(self) -> None:
        """Resets every connection; new ones are accepted."""
        self._call(self._forwarder.cut())

    def strand(self) -> None:
        """Leaves all present connections open but unconnected; new ones work as always."""
        self._call(self._strand())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    async def _listen(self) -> None:
        self._clear.set()
        self.port = await self._forwarder.listen()

    async def _close(self) -> None:
        # Waits until no connection is being accepted: asyncio would lose it at the close.
        while asyncio.all_tasks() - {asyncio.current_task()}:
            await self._forwarder.cut()
            await asyncio.sleep(0)
        self._forwarder.refuse()

    async def _change(self, weather: Weather) -> None:
        self._weather = weather
        (self._clear.clear if weather.silent else self._clear.set)()

    async def _strand(self) -> None:
        self._stranded.update(self._forwarder.passing)

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passing: Passing
    ) -> None:
        while data := await reader.read(65536):
            for piece in [] if passing in self._stranded else self._pieces(data):
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
