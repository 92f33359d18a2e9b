"""The engine's worker: takes requests from the queue, renews their leases, and drains.

It runs on one asyncio event loop; the engine runs in the thread of its EngineLoop. The scheduler
decides about batches, not the worker.
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

from headrace_common.config.process import before
from headrace_common.errors import BackendUnavailable
from headrace_common.observability.metrics_server import Page
from headrace_common.observability.telemetry import Telemetry
from headrace_common.protocol.base import EngineQueue, EngineStatus, Lease
from headrace_common.protocol.kv_events import KVEventWriter
from headrace_common.protocol.kv_roles import KVRole
from headrace_common.protocol.live import SnapshotWriter
from headrace_common.structured.grammar_checks import CheckBounds, GrammarChecks
from headrace_common.structured.refused_grammars import LocalRefusedGrammars
from headrace_common.wire.messages import Drain, Recall, Watch

from ..core.errors import EngineError, RequestError
from ..core.outputs import SequenceOutput
from ..core.start_phases import StartPhases
from ..core.stats import SchedulerStats
from ..engine.engine import Engine
from ..engine.engine_loop import EngineLoop
from ..kv_cache.memory_budget import available_memory
from ..models.vision.image_reader import ImageReader
from ..structured_output.compiler import GrammarCompiler
from .adapter_loading import AdapterLoading
from .debug_pages import DebugPages
from .grammar_compilation import GrammarCompilation
from .hand_over import HandOver
from .image_reading import ImageReading
from .kv_event_reporter import KVEventReporter
from .memory_guard import MemoryGuard
from .metrics import EngineMetrics
from .model_registration import ModelRegistration
from .reply_writer import ReplyWriter, retry
from .request_tracker import RequestTracker
from .role_config import RoleConfig
from .sleep_pages import SleepPages
from .sleeper import Sleeper
from .snapshot_reporter import SnapshotReporter
from .step_log import StepLog
from .turn_taking import TurnTaking

logger = logging.getLogger(__name__)
P = ParamSpec("P")

# A gateway releases an engine's requests to others if it hears nothing from the engine for 2-3 s.
KEEP_ALIVE_INTERVAL = 1.0
# Seconds between two searches for requests that other engines had begun. Their clients wait in the
# middle of an answer, so they come before new requests, however many of these there are.
REAP_INTERVAL = 1.0
# How long the step in progress at the end may take.
LAST_STEP_S = 10.0


class WorkerFailed(EngineError):
    """The engine cannot continue. Other engines take its requests once the leases expire."""

    code = "worker_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Configuration of a worker. Times are in seconds.

    `lookahead` requests are taken beyond those that can start, for the scheduling policy to choose
    from. Requests of low priority are taken while less than `low_priority_share` of `max_num_seqs`
    run. Within `resume_timeout` a gateway must tell which tokens its client has. If a gateway is
    gone, its requests run for `orphan_timeout`, in case the clients return through another one.
    With `stays_when_drained` a drained engine does not end: it waits until it is recalled or ended.
    `name` is what people call the engine, `variant` the side of requests that it runs.
    """

    model: str
    name: str = ""
    variant: str = ""
    max_model_len: int
    max_num_seqs: int
    block_size: int
    kv_bytes_per_token: float = 0.0
    lookahead: int = 0
    low_priority_share: float = 1.0
    version: str
    beat_interval: float = 3.0
    drain_timeout: float = 30.0
    stays_when_drained: bool = False
    resume_timeout: float = 2.0
    step_timeout: float = 120.0
    orphan_timeout: float = 30.0
    throughput_window: float = 30.0
    debug_pages: bool = False
    sleep_pages: bool = False
    grammar_bounds: CheckBounds = field(default_factory=CheckBounds)
    roles: RoleConfig = RoleConfig()


class Worker:
    """Moves requests from the queue into an EngineLoop and its outputs back.

    Made on a running event loop. `run` serves until `end` (or `drain`, unless the engine stays) was
    called and the requests are finished or given back. It raises WorkerFailed if a step of the
    engine failed or hangs.
    """

    def __init__(
        self,
        config: WorkerConfig,
        queue: EngineQueue,
        engine: Engine,
        telemetry: Telemetry,
        registration: ModelRegistration | None = None,
        grammars: GrammarCompiler | None = None,
        snapshots: SnapshotWriter | None = None,
        adapters: AdapterLoading | None = None,
        turns: TurnTaking | None = None,
        phases: StartPhases | None = None,
        image_reader: ImageReader | None = None,
        kv_events: KVEventWriter | None = None,
    ) -> None:
        self._config = config
        self._queue = queue
        self._registration = registration
        self._adapters = adapters
        self._turns = turns
        self._phases = phases or StartPhases()
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
            variant=config.variant,
            stats=lambda: self._stats,
            step_age=self.stalled_for,
            lora_stats=engine.lora_stats,
            sleep_level=lambda: self.sleeper.level or 0,
            start_seconds=lambda: self._phases.seconds,
        )
        self._reply_writer = ReplyWriter(queue)
        checks = GrammarChecks(config.grammar_bounds, LocalRefusedGrammars())
        self._compilation = GrammarCompilation(grammars, checks, self._metrics.compiled)
        self._images = ImageReading(queue, image_reader)
        self._serving = False
        self._reaped_at = -math.inf
        self._gone_since: dict[str, float] = {}
        self._draining = asyncio.Event()
        self._ending = asyncio.Event()
        self._handing_over = False  # whether a drain gives everything back at once
        self._changed = asyncio.Event()
        self.sleeper = Sleeper(engine, self._loop, self._changed.set, config.drain_timeout)
        self._taking = asyncio.Lock()  # held while requests of other engines are taken over
        self._tracker = RequestTracker(
            queue=queue,
            loop=self._loop,
            compilation=self._compilation,
            images=self._images,
            reply_writer=self._reply_writer,
            metrics=self._metrics,
            status=self._status,
            on_room=self._changed.set,
            on_error=self._on_failure,
            resume_timeout=config.resume_timeout,
            kv_bytes_per_token=config.kv_bytes_per_token,
        )
        self._hand_over = self._make_hand_over(engine)
        self._throughput = _Throughput(config.throughput_window)
        self._memory = MemoryGuard(available_memory)
        self._steps = StepLog()
        self._snapshots = (
            None
            if snapshots is None
            else SnapshotReporter(
                self._loop, self._steps, self._tracker.by_engine_key, snapshots, config.block_size
            )
        )
        self._kv_events = self._make_kv_events(engine, kv_events)
        self._event_loop = asyncio.get_running_loop()
        telemetry.set_pages(self._pages(engine))
        self._failure: asyncio.Future[None] = self._event_loop.create_future()

    def _make_hand_over(self, engine: Engine) -> HandOver | None:
        if self._config.roles.role is KVRole.BOTH:
            return None
        return HandOver(
            self._config.roles,
            queue=self._queue,
            engine=engine,
            loop=self._loop,
            tracker=self._tracker,
            metrics=self._metrics,
            status=lambda: self._status(self._tracker.sequences),
            block_size=self._config.block_size,
            kv_bytes_per_token=self._config.kv_bytes_per_token,
            on_error=self._on_failure,
        )

    def _make_kv_events(
        self, engine: Engine, writer: KVEventWriter | None
    ) -> KVEventReporter | None:
        cached = None if writer is None else engine.follow_cached_blocks()
        if writer is None or cached is None:
            return None
        return KVEventReporter(cached, writer, self._config.block_size)

    def _pages(self, engine: Engine) -> Mapping[str, Page]:
        """What the metrics port shows and does beyond metrics and health."""
        pages: dict[str, Page] = {}
        if self._config.debug_pages:
            profiler, requests = self._loop.profiler, self._tracker.requests
            pages |= DebugPages(engine, self._steps, profiler, requests, self.stalled_for).pages()
        if self._config.sleep_pages:
            pages |= SleepPages(self.sleeper, self._event_loop).pages()
        return pages

    def _from_engine(self, handler: Callable[P, None]) -> Callable[P, None]:
        """Wraps a handler as a callback that the engine's thread may call."""

        def callback(*args: P.args, **kwargs: P.kwargs) -> None:
            self._event_loop.call_soon_threadsafe(partial(handler, *args, **kwargs))

        return callback

    def stalled_for(self) -> float:
        """Seconds since the engine's last step ended; 0 while it is idle, falls asleep or wakes."""
        if not self._loop.busy or self.sleeper.moving:
            return 0.0
        return max(0.0, time.monotonic() - self._loop.last_step_at)

    def stuck(self) -> str | None:
        """The reason to restart the process, or None. Callable from any thread."""
        stalled = self.stalled_for()
        if stalled > self._config.step_timeout:
            return f"no step has ended for {stalled:.0f} s, longer than step_timeout"
        return None

    def not_ready(self) -> str | None:
        """The reason why the engine takes no work, or None. Callable from any thread."""
        if self._draining.is_set():
            return "draining"
        return self.stuck() if self._serving else "starting"

    def fail(self, error: Exception) -> None:
        """Ends `run` with WorkerFailed. Callable from any thread."""
        self._event_loop.call_soon_threadsafe(self._on_failure, error)

    def end(self) -> None:
        """Drains and then ends `run`; ends it at once if it does not serve yet."""
        self._ending.set()
        self.drain()

    def drain(self, within: float = math.inf) -> None:
        """Takes no more work; finishes running requests, and gives the rest back at the timeout.

        If the engine may run for `within` seconds only, which is less than that, it gives back all
        of them at once: their KV must be written by then, too.
        """
        self._handing_over = self._handing_over or within < self._config.drain_timeout
        self._draining.set()
        self._changed.set()

    def recall(self) -> None:
        """Takes work again, unless `end` was called."""
        if not self._ending.is_set():
            self._draining.clear()
            self._handing_over = False
            self._changed.set()

    async def run(self) -> None:
        if not await before(self._begin(), self._ending):
            await self._end_loop()
            return
        services = [self._reply_writer.run, self._controls, self._beats, self._keep_alive]
        if self._registration is not None:
            services.append(partial(self._registration.keep, self._draining.is_set))
        if self._adapters is not None:
            services.append(partial(self._adapters.keep, self._tracker.adapters))
            services.append(self._adapters.keep_reported)
        if self._turns is not None:
            running = partial(len, self._tracker.requests)
            take_turns = partial(
                self._turns.keep,
                self.sleeper,
                self._draining.is_set,
                running,
                self._metrics.turn_began,
            )
            services.append(take_turns)
        if self._hand_over is not None:
            services.append(self._hand_over.keep)
        if self._kv_events is not None:
            services.append(self._kv_events.keep)
        tasks = [asyncio.create_task(service()) for service in services]
        try:
            await self._while_tasks_run(self._work(), *tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._hand_over is not None:
                await self._hand_over.close()
            await self._tracker.close()
            await self._compilation.close()
            self._images.close()
            if self._snapshots is not None:
                await self._snapshots.close()
        await self._end_loop()

    async def _end_loop(self) -> None:
        """Waits for the current step, whose outputs this event loop gets."""
        self._loop.stop()
        if self._loop.alive and not await asyncio.to_thread(self._loop.join, LAST_STEP_S):
            logger.warning("the last step has not ended", extra={"seconds": LAST_STEP_S})

    async def _begin(self) -> None:
        """Registers the engine and its model, starts the loop, loads adapters and sends the first
        beat."""
        self._phases.begin("connection")
        await retry(self._queue.start, "start")
        if self._registration is not None:
            self._phases.begin("registration")
            await self._registration.announce()
        self._loop.start()
        if self._adapters is not None:
            self._phases.begin("adapters")
            await self._adapters.start(self._queue, self._loop, self._draining.is_set)
        self._phases.begin("first_beat")
        await retry(lambda: self._queue.beat((), self._status(0)), "first beat")
        self._serving = True
        self._phases.end()
        extra = {"model": self._config.model, **self._phases.summary()}
        logger.info("engine ready", extra=extra)

    async def _work(self) -> None:
        """Takes work, and drains or sleeps; again after each recall and wake-up."""
        while True:
            await self._intake()
            if not await self._finish():
                continue
            if self._draining.is_set():
                await self._give_back()
            await self._pause()
            if self._draining.is_set():
                return

    async def _while_tasks_run(
        self, awaited: Coroutine[Any, Any, object], *tasks: asyncio.Task[None]
    ) -> None:
        """Waits for `awaited`. Raises the failure of the engine, or of a task that ended
        earlier."""
        goal = asyncio.create_task(awaited)
        watched: set[asyncio.Future[Any]] = {goal, self._failure, *tasks}
        done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        goal.cancel()
        for future in done:
            future.result()
        if goal not in done:
            raise WorkerFailed("a background task of the worker ended while the worker served")

    def _on_step(
        self, outputs: Sequence[SequenceOutput], stats: SchedulerStats, seconds: float | None
    ) -> None:
        self._stats = stats
        if seconds is not None:
            self._metrics.observe(stats, seconds, self._tracker.requests)
        tokens = sum(map(self._tracker.on_output, outputs))
        if self._hand_over is not None:
            self._hand_over.move()
        if self._kv_events is not None:
            self._kv_events.notify()
        if seconds is not None:
            self._steps.add(stats, seconds, time.time(), tokens)
        self._throughput.add(tokens, time.monotonic())
        self._changed.set()

    def _on_rejected(self, engine_key: str, error: RequestError) -> None:
        self._tracker.on_rejected(engine_key, error)

    def _on_failure(self, error: BaseException) -> None:
        if not self._failure.done():
            failed = WorkerFailed(f"{type(error).__name__}: {error}")
            failed.__cause__ = error
            self._failure.set_exception(failed)

    # Intake

    async def _intake(self) -> None:
        """Takes the requests that can start now, until the worker drains or is to sleep."""
        while not self._pausing:
            self._changed.clear()
            room = self._room()
            if room == 0:
                await self._changed.wait()
                continue
            try:
                reap_due = time.monotonic() - self._reaped_at >= REAP_INTERVAL
                leases = await self._reap() if reap_due else ()
                leases = leases or await self._queue.take(
                    room, self._free_tokens(), self._low_priority_room()
                )
                await self._tracker.begin(leases)
                if not leases:
                    await self._until_work_or_change()
                    await self._tracker.begin(await self._reap())
            except BackendUnavailable as error:
                logger.warning("redis unavailable, intake pauses", extra={"error": str(error)})
                await asyncio.sleep(1.0)

    async def _until_work_or_change(self) -> None:
        """Waits until the queue has something, or room may have become free."""
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

    @property
    def _pausing(self) -> bool:
        """Whether the engine takes no work: it drains, sleeps, or is about to."""
        sleeps = self.sleeper.wanted is not None or self.sleeper.level is not None
        return sleeps or self._draining.is_set()

    def _room(self) -> int:
        """The number of further requests to take: those that can start now, and the lookahead."""
        if self._pausing or self._tracker.has_suspect:
            return 0
        if self._tracker.requests and self._memory.short:
            return 0
        lookahead, waiting = self._config.lookahead, self._stats.waiting
        room = self._config.max_num_seqs + lookahead - self._tracker.sequences
        return max(0, min(room, lookahead - waiting) if waiting else room)

    def _low_priority_room(self) -> int | None:
        """The most further requests of low priority; None: no limit of their own."""
        if self._config.low_priority_share == 1:
            return None
        most = max(1, int(self._config.low_priority_share * self._config.max_num_seqs))
        return max(0, most - self._tracker.sequences)

    def _free_tokens(self) -> int | None:
        """Prompt tokens that fit the KV cache now; None: no limit (idle, or with lookahead)."""
        if not self._tracker.requests or self._config.lookahead:
            return None
        return (self._stats.blocks_free + self._stats.blocks_cached) * self._config.block_size

    async def _reap(self) -> Sequence[Lease]:
        room = self._room()
        if room == 0:
            return ()
        self._reaped_at = time.monotonic()
        return await self._queue.reap(room, suspects=not self._tracker.has_suspect)

    async def _controls(self) -> None:
        async for control in self._queue.controls():
            match control:
                case Drain():
                    within = control.within_ms
                    self.drain(math.inf if within is None else within / 1000)
                case Recall():
                    self.recall()
                case Watch():
                    if self._snapshots is not None:
                        self._snapshots.watch(control.duration_ms / 1000)
                case _:
                    self._tracker.handle_control(control)

    # Beats

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(self._config.beat_interval)
            if problem := self.stuck():  # end the process, so that other engines take its requests
                self._on_failure(TimeoutError(problem))
            await self._tracker.beat(list(self._tracker.requests))
            try:
                async with self._taking:
                    await self._tracker.begin(await self._reap())
                await self._cancel_orphans()
            except BackendUnavailable as error:
                logger.warning("redis unavailable, nothing reaped", extra={"error": str(error)})

    async def _cancel_orphans(self) -> None:
        """Ends requests whose gateway has been gone for longer than `orphan_timeout`."""
        now = time.monotonic()
        gone: dict[str, float] = {}
        for gateway_id in {leased.gateway_id for leased in self._tracker.requests}:
            if not await self._queue.gateway_alive(gateway_id):
                gone[gateway_id] = self._gone_since.get(gateway_id, now)
        self._gone_since = gone
        for gateway_id, since in gone.items():
            if now - since >= self._config.orphan_timeout:
                self._tracker.cancel_orphans(gateway_id, now - since)

    def _status(self, running: int) -> EngineStatus:
        return EngineStatus(
            engine_id=self._queue.engine_id,
            model=self._config.model,
            max_model_len=self._config.max_model_len,
            running=running,
            capacity=self._config.max_num_seqs,
            kv_utilization=self._stats.kv_utilization,
            tokens_per_second=self._throughput.rate(time.monotonic()),
            last_step_age=self.stalled_for(),
            draining=self._draining.is_set(),
            sleep_level=self.sleeper.wanted or self.sleeper.level or 0,
            version=self._config.version,
            time_to_turn=0.0 if self._turns is None else self._turns.time_to_turn,
            name=self._config.name,
            variant=self._config.variant,
            shows_batch=self._snapshots is not None,
            kv_role=self._config.roles.role.value,
            max_local_prefill_length=self._config.roles.max_local_prefill_length,
        )

    async def _keep_alive(self) -> None:
        """Tells gateways that the engine is alive, also while its steps take long."""
        while True:
            await self._tracker.busy.wait()
            await asyncio.sleep(KEEP_ALIVE_INTERVAL)
            for gateway_id in {leased.gateway_id for leased in self._tracker.requests}:
                self._reply_writer.keep_alive(gateway_id, KEEP_ALIVE_INTERVAL)

    # Drain and sleep

    async def _finish(self) -> bool:
        """Waits until nothing runs or the time is up; returns whether that was still wanted.

        A beat at the start informs other processes.
        """
        draining = self._draining.is_set()
        timeout = self._config.drain_timeout if draining else self.sleeper.timeout
        deadline = time.monotonic() + timeout
        async with self._taking:  # what is being taken over now is finished or given back, too
            await self._tracker.beat(())
        while self._tracker.requests and (left := deadline - time.monotonic()) > 0:
            if self._handing_over:
                logger.info("requests are handed over: the engine's node ends")
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._next_change()
            if self._draining.is_set() is not draining or not self._pausing:
                return False
        return True

    async def _give_back(self) -> None:
        """Gives what still runs to other engines, and tells other processes."""
        requests = list(self._tracker.requests)
        await self._tracker.give_back(requests)
        if self._hand_over is not None:
            await self._hand_over.finish()
        logger.info("drained", extra={"given_back": len(requests)})
        await self._tracker.beat(())

    async def _pause(self) -> None:
        """Is drained or asleep as long as that is wanted, or until the engine is to end."""
        while self._pausing:
            ends = self._ending.is_set() or not self._config.stays_when_drained
            if self._draining.is_set() and ends:
                return
            wanted, level = self.sleeper.wanted, self.sleeper.level
            if wanted is not None and level is None:
                # At the same time: while Redis is unreachable, nothing can be given back.
                asleep = self.sleeper.fall_asleep(wanted)
                _, self._stats = await asyncio.gather(self._give_back(), asleep)
                await self._tracker.beat(())
            elif wanted is None and level is not None:
                await self.sleeper.wake()
                await self._tracker.beat(())
            else:
                await self._next_change()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class _Throughput:
    """Output tokens per second, a mean with weights that decay over `window` seconds."""

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
