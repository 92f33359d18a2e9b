"""Keeps child processes alive: restarts with backoff, gives up on those that cannot start, drains.

It does not know what the children do. It waits for events between restarts and never polls.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..errors import StartFailed
from .child import Child, ChildSpec, Exit
from .logs import LogFile, LogLine
from .report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The backoff of restarts, in seconds; a run of `healthy_after` resets it.

    A child that was never ready is given up after `max_starts` runs, or immediately if its exit
    code is one of `hopeless_codes`: it refuses its settings, which a restart does not change.
    """

    first_delay: float = 0.5
    max_delay: float = 30.0
    healthy_after: float = 30.0
    max_starts: int = 3
    hopeless_codes: frozenset[int] = frozenset({2, 78})

    def delay(self, failures: int) -> float:
        """Seconds before the restart after this many consecutive failures (1 or more)."""
        return float(min(self.max_delay, self.first_delay * 2 ** min(failures - 1, 16)))

    def hopeless(self, code: int, starts: int) -> bool:
        return code in self.hopeless_codes or starts >= self.max_starts


class Service:
    """A child that should run until it is stopped. `ready` returns once a run can serve."""

    def __init__(
        self,
        spec: ChildSpec,
        *,
        log: LogFile,
        report: Report,
        policy: RestartPolicy,
        ready: Callable[[], Awaitable[None]],
    ) -> None:
        self.spec = spec
        self._log = log
        self._report = report
        self._policy = policy
        self._until_ready = ready
        self._child: Child | None = None
        self._stopping = asyncio.Event()
        self._over = asyncio.Event()
        self._killing = False
        self._serving = False
        self._reported = ""  # the last line that was reported as an alarm
        self._failures = 0
        self.starts = 0
        self.ready = asyncio.Event()
        """Set when a run was ready for the first time: later deaths are accidents."""

    @property
    def pid(self) -> int | None:
        """The process id of the current run; None between two runs."""
        return self._child.pid if self._child is not None and self._child.running else None

    async def run(self) -> None:
        """Runs the child until `stop`. Raises StartFailed if the child can never start."""
        try:
            while not self._stopping.is_set():
                started = asyncio.get_running_loop().time()
                ended = await self._run_once()
                if self._stopping.is_set():
                    return
                lived = asyncio.get_running_loop().time() - started
                await self._after_death(ended, lived)
        finally:
            self._over.set()
            self._log.close()

    async def stop(self) -> None:
        """Sends SIGTERM, waits up to `drain_seconds`, then sends SIGKILL.

        Returns when `run` is over.
        """
        self._stopping.set()
        self._signal_child()
        try:
            await asyncio.wait_for(self._over.wait(), self.spec.drain_seconds)
        except TimeoutError:
            patience = f"{self.spec.drain_seconds:g} s"
            self._report.event(f"{self.spec.name} did not drain in {patience}: killing it")
            self.kill()
            await self._over.wait()

    def kill(self) -> None:
        self._stopping.set()
        self._killing = True
        self._signal_child()

    def crash(self) -> None:
        """Kills the current run, if any, as a crash would: another run follows."""
        if self._child is not None:
            self._child.kill()

    def _signal_child(self) -> None:
        if self._child is not None:
            if self._killing:
                self._child.kill()
            else:
                self._child.terminate()

    async def _run_once(self) -> Exit:
        self.starts += 1
        try:
            self._child = await Child.spawn(self.spec, self._on_line)
        except OSError as error:
            raise StartFailed(f"{self.spec.name} cannot be started: {error}") from error
        if self._stopping.is_set():  # it was stopped while it was being started
            self._signal_child()
        watch = asyncio.create_task(self._watch_readiness())
        try:
            return await self._child.wait()
        finally:
            self._serving = False
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch_readiness(self) -> None:
        started = asyncio.get_running_loop().time()
        self._report.status(self.spec.name, "starting")
        await self._until_ready()
        self._serving = True
        self.ready.set()
        took = asyncio.get_running_loop().time() - started
        self._report.status(self.spec.name, f"ready in {took:.1f} s", done=True)

    async def _after_death(self, ended: Exit, lived: float) -> None:
        if not self.ready.is_set() and self._policy.hopeless(ended.code, self.starts):
            raise StartFailed(self._obituary(ended, "cannot start"))
        self._failures = 1 if lived >= self._policy.healthy_after else self._failures + 1
        delay = self._policy.delay(self._failures)
        self._report.event(
            self._obituary(ended, "died") + f"\n{self.spec.name}: restarting in {delay:g} s"
        )
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay)

    def _obituary(self, ended: Exit, verb: str) -> str:
        """A sentence about the end of a run, with its last lines unless the report has just shown
        the reason."""
        head = f"{self.spec.name} {verb} ({ended.reason})"
        if ended.tail and ended.tail[-1] == self._reported:
            return f"{head}, as it says above; all its lines are in {self._log.path}"
        lines = "".join(f"\n  {line}" for line in ended.tail)
        return f"{head}; its last lines (all in {self._log.path}):{lines}" if lines else head

    def _on_line(self, line: LogLine) -> None:
        if lost := self._log.write(line):
            self._report.alarm(self.spec.name, f"its log lines are lost ({lost})")
        if self.spec.quiet and (not self._serving or self._stopping.is_set()):
            return
        if line.alarming:
            self._reported = line.summary
            self._report.alarm(self.spec.name, line.summary)
        elif line.structured and line.level == "INFO" and not self._serving:
            self._report.status(self.spec.name, line.summary)


class Supervisor:
    """Services in the order of their start. `failed` completes when one of them gives up."""

    def __init__(self) -> None:
        self._tasks: dict[Service, asyncio.Task[None]] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, service: Service) -> None:
        task = asyncio.create_task(service.run(), name=service.spec.name)
        self._tasks[service] = task
        task.add_done_callback(self._ended)

    async def stop(self, services: Sequence[Service]) -> None:
        """Drains these services together; returns when all have ended."""
        await asyncio.gather(*(service.stop() for service in services))

    def kill(self) -> None:
        """Sends SIGKILL to everything."""
        for service in self._tasks:
            service.kill()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # retrieved here, in case no task waits for it
