"""Says in the queue which phase of the start the engine is in, until it can take work.

It has a thread and a connection of its own, because the process's main thread loads the model.
"""

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from headrace_common.errors import HeadraceError
from headrace_common.protocol.live import EngineStart
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.starts import RedisStarts

from ..core.start_phases import StartPhases

logger = logging.getLogger(__name__)

# Seconds between two notices.
INTERVAL = 1.0
# Seconds to wait for the end of the last one.
PATIENCE = 5.0


@contextmanager
def announced_start(
    config: ConnectionConfig, model: str, engine_id: str, name: str, phases: StartPhases
) -> Iterator[None]:
    """Announces the start while the block runs. A queue that is unreachable delays nothing."""
    notice = _StartNotice(config, model, engine_id, name, phases)
    notice.start()
    try:
        yield
    finally:
        notice.stop()


class _StartNotice(threading.Thread):
    """Writes the phase each INTERVAL and removes it at the end."""

    def __init__(
        self, config: ConnectionConfig, model: str, engine_id: str, name: str, phases: StartPhases
    ) -> None:
        super().__init__(name="start-notice", daemon=True)
        self._config, self._model = config, model
        self._engine_id, self._name, self._phases = engine_id, name, phases
        self._stopped = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        try:
            asyncio.run(self._announce())
        except HeadraceError:
            pass  # the engine itself reports it when it connects
        except Exception:
            logger.exception("the start is not announced")

    def stop(self) -> None:
        """Removes the notice, and waits for that at most PATIENCE seconds."""
        with self._lock:
            self._stopped.set()
            if self._loop is not None and self._wake is not None:
                self._loop.call_soon_threadsafe(self._wake.set)
        self.join(PATIENCE)

    async def _announce(self) -> None:
        connection = Connection(self._config)
        starts = RedisStarts(connection, self._model)
        with self._lock:
            self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        try:
            while not self._stopped.is_set():
                with suppress(HeadraceError):
                    await starts.write(self._now())
                with suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL):
                        await self._wake.wait()
            with suppress(HeadraceError):
                await starts.remove(self._engine_id)
        finally:
            with self._lock:
                self._loop = None
            await connection.close()

    def _now(self) -> EngineStart:
        phases = self._phases
        return EngineStart(
            engine_id=self._engine_id,
            name=self._name,
            phase=phases.current or "",
            seconds=round(phases.age, 1),
        )
