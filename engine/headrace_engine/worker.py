"""The engine's shell: pulls requests that it can start now and keeps their leases.

Everything here happens on one asyncio event loop; the engine itself runs in the thread of its
EngineLoop. Decides nothing about batches: that is the scheduler's.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec

from headrace_common.errors import BackendUnavailable
from headrace_common.grammar_checks import CheckBounds, GrammarChecks
from headrace_common.messages import Drain
from headrace_common.metrics_server import Page
from headrace_common.protocol.base import EngineQueue, EngineStatus, Lease, Progress
from headrace_common.refused_grammars import LocalRefusedGrammars
from headrace_common.telemetry import Telemetry

from .active import ActiveRequest
from .compilation import Compilation
from .debug_pages import DebugPages
from .engine import Engine
from .errors import EngineError, RequestError
from .grammar.compiler import GrammarCompiler
from .kv_budget import available_memory
from .loop import EngineLoop
from .memory_guard import MemoryGuard
from .metrics import EngineMetrics
from .outbox import Outbox, persist
from .outputs import SequenceOutput
from .registration import Registration
from .roster import Roster
from .stats import SchedulerStats
from .step_log import StepLog

logger = logging.getLogger(__name__)
P = ParamSpec("P")

# A gateway gives away what an engine holds that it has not heard of for 2-3 s.
SIGN_OF_LIFE_INTERVAL = 1.0


class WorkerFailed(EngineError):
    """The engine cannot go on; its requests move to others once their leases lapse."""

    code = "worker_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Times in seconds.

    `resume_timeout`: how long a gateway may take to say what its client has. `orphan_timeout`: how
    long a request runs on after its gateway is gone, for its client to come back through another.
    `lookahead`: how many requests to take beyond those that can start, for the scheduling policy to
    choose from.
    """

    model: str
    max_model_len: int
    max_num_seqs: int
    block_size: int
    lookahead: int = 0
    version: str
    beat_interval: float = 3.0
    drain_timeout: float = 30.0
    resume_timeout: float = 2.0
    step_timeout: float = 120.0
    orphan_timeout: float = 30.0
    throughput_window: float = 30.0
    debug_pages: bool = False
    grammar_bounds: CheckBounds = field(default_factory=CheckBounds)


class Worker:
    """Moves requests from the queue into an EngineLoop and its outputs back.

    Made on a running event loop. `run` serves until `drain` was called and the work is done or
    given back; it raises WorkerFailed where the engine's step failed or hangs.
    """

    def __init__(
        self,
        config: WorkerConfig,
        queue: EngineQueue,
        engine: Engine,
        telemetry: Telemetry,
        registration: Registration | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._config = config
        self._queue = queue
        self._registration = registration
        self._stats = engine.stats()
        self._loop = EngineLoop(
            engine,
            on_step=self._from_engine(self._on_step),
            on_rejected=self._from_engine(self._on_rejected),
            on_failure=self._from_engine(self._on_failure),
        )
        self._metrics = EngineMetrics(
            telemetry,
            model=config.model,
            engine_id=queue.engine_id,
            block_size=config.block_size,
            capacity=config.max_num_seqs,
            stats=lambda: self._stats,
            step_age=self.stalled_for,
            adapters=engine.adapters,
        )
        self._outbox = Outbox(queue)
        checks = GrammarChecks(config.grammar_bounds, LocalRefusedGrammars())
        self._compilation = Compilation(grammars, checks, self._metrics.compiled)
        self._serving = False
        self._gone_since: dict[str, float] = {}
        self._draining = asyncio.Event()
        self._changed = asyncio.Event()
        self._roster = Roster(
            queue=queue,
            loop=self._loop,
            compilation=self._compilation,
            outbox=self._outbox,
            metrics=self._metrics,
            beat=self._beat,
            changed=self._changed.set,
            failed=self._on_failure,
            resume_timeout=config.resume_timeout,
        )
        self._throughput = _Throughput(config.throughput_window)
        self._memory = MemoryGuard(available_memory)
        self._steps = StepLog()
        if config.debug_pages:
            telemetry.set_pages(self._debug_pages(engine))
        self._event_loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._event_loop.create_future()

    def _debug_pages(self, engine: Engine) -> Mapping[str, Page]:
        return DebugPages(
            engine,
            self._steps,
            self._loop.profiler,
            lambda: self._roster.requests,
            self.stalled_for,
        ).pages()

    def _from_engine(self, handler: Callable[P, None]) -> Callable[P, None]:
        """The handler as a callback that the engine's thread may call."""

        def callback(*args: P.args, **kwargs: P.kwargs) -> None:
            self._event_loop.call_soon_threadsafe(partial(handler, *args, **kwargs))

        return callback

    def stalled_for(self) -> float:
        """Seconds since the engine last ended a step while it has work; 0 while it is idle."""
        if not self._loop.busy:
            return 0.0
        return max(0.0, time.monotonic() - self._loop.last_step_at)

    def stuck(self) -> str | None:
        """Why the process should be restarted, or None. Callable from any thread."""
        stalled = self.stalled_for()
        if stalled > self._config.step_timeout:
            return f"no step has ended for {stalled:.0f} s"
        return None

    def not_ready(self) -> str | None:
        """Why the engine takes no work, or None. Callable from any thread."""
        if self._draining.is_set():
            return "draining"
        return self.stuck() if self._serving else "starting"

    def fail(self, error: Exception) -> None:
        """Ends the service, as the engine cannot go on. Callable from any thread."""
        self._event_loop.call_soon_threadsafe(self._on_failure, error)

    def drain(self) -> None:
        """Takes no more work; what runs is finished or, when the time is up, given back."""
        self._draining.set()
        self._changed.set()

    async def run(self) -> None:
        await persist(self._queue.start, "start")
        if self._registration is not None:
            await self._registration.announce()
        self._loop.start()
        await persist(partial(self._beat_once, ()), "first beat")
        self._serving = True
        logger.info("engine ready", extra={"model": self._config.model})
        services = [self._outbox.run, self._controls, self._beats, self._signs_of_life]
        if self._registration is not None:
            services.append(partial(self._registration.keep, self._draining.is_set))
        tasks = [asyncio.create_task(service()) for service in services]
        try:
            await self._until(self._intake(), *tasks)
            await self._until(self._finish_or_give_back(), *tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._roster.close()
            await self._compilation.close()
        self._loop.stop()

    async def _until(
        self, awaited: Coroutine[Any, Any, object], *tasks: asyncio.Task[None]
    ) -> None:
        """Waits for `awaited`; raises what failed first: the engine or one of the tasks."""
        goal = asyncio.create_task(awaited)
        watched: set[asyncio.Future[Any]] = {goal, self._failure, *tasks}
        done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        goal.cancel()
        for future in done:
            future.result()
        if goal not in done:
            raise WorkerFailed("a task of the worker ended early")

    def _on_step(
        self, outputs: Sequence[SequenceOutput], stats: SchedulerStats, seconds: float | None
    ) -> None:
        self._stats = stats
        if seconds is not None:
            self._metrics.observe(stats, seconds)
            self._steps.add(stats, seconds, time.time())
        tokens = sum(map(self._roster.on_output, outputs))
        self._throughput.add(tokens, time.monotonic())
        self._changed.set()

    def _on_rejected(self, engine_key: str, error: RequestError) -> None:
        self._roster.on_rejected(engine_key, error)

    def _on_failure(self, error: BaseException) -> None:
        if not self._failure.done():
            failed = WorkerFailed(f"{type(error).__name__}: {error}")
            failed.__cause__ = error
            self._failure.set_exception(failed)

    # Intake

    async def _intake(self) -> None:
        """Takes what can start now, until the worker drains. Never drops a lease half-way."""
        while not self._draining.is_set():
            self._changed.clear()
            room = self._room()
            if room == 0:
                await self._changed.wait()
                continue
            try:
                leases = await self._queue.take(room, self._free_tokens())
                await self._roster.begin(leases)
                if not leases:
                    await self._until_work_or_change()
                    await self._roster.begin(await self._reap())
            except BackendUnavailable as error:
                logger.warning("redis unavailable, intake pauses", extra={"error": str(error)})
                await asyncio.sleep(1.0)

    async def _until_work_or_change(self) -> None:
        """Waits for something in the queue, or for room that what is there may fit."""
        work = asyncio.create_task(self._queue.wait())
        change = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({work, change}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            change.cancel()
            await asyncio.gather(work, change, return_exceptions=True)

    def _room(self) -> int:
        """How many more requests to take: as many as could start now, and the lookahead."""
        if self._draining.is_set() or self._roster.has_suspect:
            return 0
        if self._roster.requests and self._memory.short:
            return 0
        lookahead, waiting = self._config.lookahead, self._stats.waiting
        room = self._config.max_num_seqs + lookahead - self._roster.sequences
        return max(0, min(room, lookahead - waiting) if waiting else room)

    def _free_tokens(self) -> int | None:
        """Prompt tokens that fit the KV cache now; None where nothing runs, or may wait here."""
        if not self._roster.requests or self._config.lookahead:
            return None
        return (self._stats.blocks_free + self._stats.blocks_cached) * self._config.block_size

    async def _reap(self) -> Sequence[Lease]:
        room = self._room()
        if room == 0:
            return ()
        return await self._queue.reap(room, suspects=not self._roster.has_suspect)

    async def _controls(self) -> None:
        async for control in self._queue.controls():
            if isinstance(control, Drain):
                self.drain()
            else:
                self._roster.obey(control)

    # Beats

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(self._config.beat_interval)
            self._check_step()
            await self._beat(list(self._roster.requests))
            try:
                await self._roster.begin(await self._reap())
                await self._cancel_orphans()
            except BackendUnavailable as error:
                logger.warning("redis unavailable, nothing reaped", extra={"error": str(error)})

    async def _cancel_orphans(self) -> None:
        """Ends requests whose gateway has been gone for so long that no client is waiting."""
        now = time.monotonic()
        gone: dict[str, float] = {}
        for gateway_id in {active.gateway_id for active in self._roster.requests}:
            if not await self._queue.gateway_alive(gateway_id):
                gone[gateway_id] = self._gone_since.get(gateway_id, now)
        self._gone_since = gone
        for gateway_id, since in gone.items():
            if now - since >= self._config.orphan_timeout:
                self._roster.cancel_orphans(gateway_id, now - since)

    async def _beat(self, requests: Sequence[ActiveRequest]) -> None:
        """Renews leases and the engine's status; a beat that is missed is made up by the next."""
        try:
            await self._beat_once([active.progress() for active in requests])
        except BackendUnavailable as error:
            logger.warning("redis unavailable, beat missed", extra={"error": str(error)})

    async def _beat_once(self, progress: Sequence[Progress]) -> None:
        self._roster.heed(progress, await self._queue.beat(progress, self._status()))

    def _status(self) -> EngineStatus:
        return EngineStatus(
            engine_id=self._queue.engine_id,
            model=self._config.model,
            max_model_len=self._config.max_model_len,
            running=self._roster.sequences,
            capacity=self._config.max_num_seqs,
            kv_utilization=self._stats.kv_utilization,
            tokens_per_second=self._throughput.rate(time.monotonic()),
            last_step_age=self.stalled_for(),
            draining=self._draining.is_set(),
            version=self._config.version,
        )

    def _check_step(self) -> None:
        """A step that hangs must not keep its leases: the process ends, others take over."""
        if problem := self.stuck():
            self._on_failure(TimeoutError(problem))

    async def _signs_of_life(self) -> None:
        """Lets gateways know of an engine whose steps are long, or whose requests all wait."""
        while True:
            await self._roster.busy.wait()
            await asyncio.sleep(SIGN_OF_LIFE_INTERVAL)
            for gateway_id in {active.gateway_id for active in self._roster.requests}:
                self._outbox.greet(gateway_id, quiet_for=SIGN_OF_LIFE_INTERVAL)

    # Drain

    async def _finish_or_give_back(self) -> None:
        deadline = time.monotonic() + self._config.drain_timeout
        while self._roster.requests and (left := deadline - time.monotonic()) > 0:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()
        rest = list(self._roster.requests)
        progress = [active.progress() for active in rest]
        for active in rest:
            self._roster.drop(active)
        await self._outbox.settled()
        if rest:
            ids = [active.request_id for active in rest]
            await persist(partial(self._beat_once, progress), "last beat")
            await persist(partial(self._queue.give_back, ids), "give back")
        logger.info("drained", extra={"given_back": len(rest)})


class _Throughput:
    """Output tokens a second, averaged with weights that fade over `window` seconds."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._tokens = 0.0
        self._at = time.monotonic()

    def add(self, tokens: int, now: float) -> None:
        self._decay(now)
        self._tokens += tokens

    def rate(self, now: float) -> float:
        self._decay(now)
        return self._tokens / self._window

    def _decay(self, now: float) -> None:
        self._tokens *= math.exp(-(now - self._at) / self._window)
        self._at = now
