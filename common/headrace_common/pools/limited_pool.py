"""A pool of processes that may be killed, for work on clients' input.

A task that exceeds a limit or breaks its process only costs an error. Processes start with the
first task, from a fork server without this process's threads and locks, and end after IDLE_S
without a task.
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
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, Unpack

from pebble import ProcessExpired, ProcessFuture, ProcessPool

IDLE_S = 300.0
# A process is replaced after this many tasks, which bounds leaks of the libraries.
MAX_TASKS = 200
# The fork server imports this first, because its other imports take half a second of a processor.
LOW_PRIORITY = "headrace_common.pools.low_priority"
# When a container's memory is used up, these processes are killed first.
OOM_SCORE = "1000"
# The exit code that multiprocessing gives to all processes whose server is gone, living ones too.
SERVER_DIED = 255

Returned = TypeVar("Returned")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLimits:
    """The limits of one task.

    `timeout` (wall time) and `cpu_seconds` count from its start; `memory_bytes` is what it may
    allocate in addition to its process's memory at that time.
    """

    timeout: float = 5.0
    cpu_seconds: int = 1
    memory_bytes: int = 128 * 2**20


class KillReason(StrEnum):
    """The limit that a task exceeded. DIED: its process ended without exceeding one."""

    TIMEOUT = "timeout"
    CPU = "cpu"
    MEMORY = "memory"
    DIED = "died"


class TaskKilled(Exception):
    """The task has no result, because its process was ended."""

    def __init__(self, reason: KillReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class LimitedPool:
    """Runs tasks in killable processes. Use it on one event loop.

    `preload` are the modules of its tasks; the fork server imports them once.
    """

    def __init__(
        self, workers: int, limits: TaskLimits, preload: Sequence[str], idle: float = IDLE_S
    ) -> None:
        self._idle_s = idle
        self._ending: asyncio.Task[None] | None = None
        self._workers = workers
        self._limits = limits
        self._preload = [LOW_PRIORITY, __name__, *preload]
        self._context = get_context("forkserver")
        self._pool: ProcessPool | None = None
        self._starting = asyncio.Lock()
        self._futures: set[ProcessFuture[Any]] = set()
        self._running = 0
        self._idle: asyncio.TimerHandle | None = None

    async def run(
        self, function: Callable[[Unpack[Arguments]], Returned], *arguments: *Arguments
    ) -> Returned:
        """Runs the function and returns its result. Raises TaskKilled. Cancelling kills it."""
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
        """Kills the processes; running tasks are cancelled."""
        self._stop_timer()
        for future in list(self._futures):
            future.cancel()
        async with self._starting:
            await self._end()

    async def _twice(
        self, function: Callable[[Unpack[Arguments]], Returned], *arguments: *Arguments
    ) -> Returned:
        """Runs a task, a second time if the pool broke.

        A process that dies between two tasks breaks the pool for all tasks; so does the death of
        the fork server.
        """
        try:
            return await self._once(function, *arguments)
        except BrokenProcessPool:
            pass
        try:
            return await self._once(function, *arguments)
        except BrokenProcessPool as error:
            raise TaskKilled(KillReason.DIED) from error

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
            raise TaskKilled(KillReason.TIMEOUT) from error
        except MemoryError as error:
            raise TaskKilled(KillReason.MEMORY) from error
        except ProcessExpired as error:
            if error.exitcode != SERVER_DIED:
                raise TaskKilled(_kill_reason(error.exitcode)) from error
            self._abandon(pool)
            raise BrokenProcessPool("the server of processes died") from error

    def _abandon(self, pool: ProcessPool) -> None:
        """Leaves this pool, which ends after its tasks; the next task gets a new pool."""
        if self._pool is pool:
            self._pool = None
            if pool.active:
                pool.close()
                asyncio.get_running_loop().run_in_executor(None, pool.join)

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
    """Prepares this process so that a signal ends it immediately, even within native code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import_module(LOW_PRIORITY)  # without effect if the fork server has imported it
    with suppress(OSError):  # not Linux, or /proc is read-only
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    # The allocator's message at the memory limit would end up in this process's log.
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


def _kill_reason(code: int) -> KillReason:
    match -code:
        case signal.SIGXCPU:
            return KillReason.CPU
        case signal.SIGABRT:  # how Rust and C++ react to a refused allocation
            return KillReason.MEMORY
        case _:
            return KillReason.DIED
