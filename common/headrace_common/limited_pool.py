"""A pool of processes that may be killed, for work on what strangers send.

A task that exceeds a limit, or breaks its process, costs an error and nothing else. Processes start
with the first task, from a server that never had this process's threads or locks, and end after
IDLE_S without one.
"""

import asyncio
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, Unpack

from pebble import ProcessExpired, ProcessFuture, ProcessPool

IDLE_S = 300.0
# A process is replaced after this many tasks: leaks of the libraries that they use are bounded.
MAX_TASKS = 200
# The event loop and the engine's steps come first where the cores are shared.
NICE = 10
# Of all processes of a container these are ended first where its memory is used up.
OOM_SCORE = "1000"

Returned = TypeVar("Returned")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLimits:
    """What one task may take.

    `timeout` (by the clock) and `cpu_seconds` count from its start; `memory_bytes` are beyond what
    its process has by then.
    """

    timeout: float = 5.0
    cpu_seconds: int = 1
    memory_bytes: int = 128 * 2**20


class Excess(StrEnum):
    """The limit that a task exceeded. DIED: its process ended in another way."""

    TIMEOUT = "timeout"
    CPU = "cpu"
    MEMORY = "memory"
    DIED = "died"


class TaskKilled(Exception):
    """The task has no result, as its process was ended."""

    def __init__(self, excess: Excess) -> None:
        super().__init__(excess.value)
        self.excess = excess


class LimitedPool:
    """Used on one event loop. `preload` are the modules of its tasks, imported only once."""

    def __init__(
        self, workers: int, limits: TaskLimits, preload: Sequence[str], idle: float = IDLE_S
    ) -> None:
        self._idle_s = idle
        self._ending: asyncio.Task[None] | None = None
        self._workers = workers
        self._limits = limits
        self._preload = [__name__, *preload]
        self._context = get_context("forkserver")
        self._pool: ProcessPool | None = None
        self._starting = asyncio.Lock()
        self._futures: set[ProcessFuture[Any]] = set()
        self._running = 0
        self._idle: asyncio.TimerHandle | None = None

    async def run(
        self, function: Callable[[Unpack[Arguments]], Returned], *arguments: *Arguments
    ) -> Returned:
        """What the function returns. Raises TaskKilled. Cancelling kills the process."""
        self._running += 1
        self._stop_timer()
        try:
            return await self._twice(function, *arguments)
        finally:
            self._running -= 1
            if not self._running:
                running_loop = asyncio.get_running_loop()
                self._idle = running_loop.call_later(self._idle_s, self._retire)

    async def close(self) -> None:
        """Ends the processes, whatever they are doing: their tasks are cancelled."""
        self._stop_timer()
        for future in list(self._futures):
            future.cancel()
        async with self._starting:
            await self._end()

    async def _twice(
        self, function: Callable[[Unpack[Arguments]], Returned], *arguments: *Arguments
    ) -> Returned:
        """A process that dies between two tasks breaks the whole pool, also for other tasks."""
        try:
            return await self._once(function, *arguments)
        except BrokenProcessPool:
            pass
        try:
            return await self._once(function, *arguments)
        except BrokenProcessPool as error:
            raise TaskKilled(Excess.DIED) from error

    async def _once(
        self, function: Callable[[Unpack[Arguments]], Returned], *arguments: *Arguments
    ) -> Returned:
        pool = await self._started()
        task = (self._limits, function, arguments)
        future = pool.schedule(_run_limited, args=task, timeout=self._limits.timeout)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        try:
            return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise TaskKilled(Excess.TIMEOUT) from error
        except MemoryError as error:
            raise TaskKilled(Excess.MEMORY) from error
        except ProcessExpired as error:
            raise TaskKilled(_excess(error.exitcode)) from error

    async def _started(self) -> ProcessPool:
        async with self._starting:
            if self._pool is None or not self._pool.active:
                self._pool = await asyncio.to_thread(self._start)
            return self._pool

    def _start(self) -> ProcessPool:
        self._context.set_forkserver_preload(self._preload)
        pool = ProcessPool(
            max_workers=self._workers,
            max_tasks=MAX_TASKS,
            initializer=_prepare,
            context=self._context,
        )
        if not pool.active:  # asking starts it
            raise BrokenProcessPool("the pool of processes does not start")
        return pool

    def _retire(self) -> None:
        self._ending = asyncio.create_task(self._end_idle())

    async def _end_idle(self) -> None:
        async with self._starting:
            if not self._running:
                await self._end()

    async def _end(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            await asyncio.to_thread(pool.join)

    def _stop_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


def _prepare() -> None:
    """Makes this process one that a signal ends at once, also within native code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    with suppress(OSError):  # not Linux, or /proc is read-only
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    # What the allocator says where the limit of memory is reached would be taken for this log's.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def _run_limited(
    limits: TaskLimits,
    function: Callable[[Unpack[Arguments]], Returned],
    arguments: tuple[*Arguments],
) -> Returned:
    """Runs in a process of the pool. SIGXCPU and a refused allocation end it."""
    used = math.ceil(time.process_time())
    _limit(resource.RLIMIT_CPU, used + limits.cpu_seconds)
    if sys.platform == "linux":
        _limit(resource.RLIMIT_DATA, _data_bytes() + limits.memory_bytes)
    return function(*arguments)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))


def _data_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[5]
    return int(pages) * resource.getpagesize()


def _excess(code: int) -> Excess:
    match -code:
        case signal.SIGXCPU:
            return Excess.CPU
        case signal.SIGABRT:  # Rust's and C++'s answer to a refused allocation
            return Excess.MEMORY
        case _:
            return Excess.DIED
