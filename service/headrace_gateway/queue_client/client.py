"""The gateway's way to the engines: requests go into the queue, generations come out.

One task reads this gateway's frames and hands each reply to its generation. A request without news
is admitted again (which changes nothing if all is well), and taken from its engine if that is
silent. Knows nothing of HTTP or text.
"""

import asyncio
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from headrace_common.errors import (
    BackendUnavailable,
    FailureCode,
    HeadraceError,
    QueueFull,
    RequestConflict,
)
from headrace_common.protocol.base import (
    AdmitResult,
    AdmitState,
    GatewayQueue,
    Placement,
    QueueLimits,
)
from headrace_common.protocol.requests import UNKNOWN_RATE_S
from headrace_common.protocol.variants import is_comparison
from headrace_common.wire.messages import (
    Control,
    Frame,
    GenerateRequest,
    Reply,
)

from .generation import Delta, Generation, GenerationCallbacks
from .late_replies import REMEMBERED, LateReplies
from .listening_clock import ListeningClock
from .peer_streams import PeerStreams
from .request_history import RequestHistory
from .watchdog import ClientConfig, Watchdog, isolated

__all__ = ["ClientConfig", "Delta", "Generation", "GenerationClient"]

logger = logging.getLogger(__name__)

CALM = 0.002  # Seconds. If frames are further apart, they need not be handled together.
# Generations whose events are made before the first of them is written. Each write evicts Python's
# code from the CPU's caches, so writes one after the other cost less than writes in between.
TOGETHER = 32

CountShards = Callable[[str], Awaitable[int]]
TimeToTurn = Callable[[str], Awaitable[float | None]]
ChooseSide = Callable[[GenerateRequest], Awaitable[str]]


class Placer(Protocol):
    """Says which engines suit a request best."""

    async def place(self, request: GenerateRequest) -> Placement | None:
        """The request's placement; None: any engine may take it."""

    def taken(
        self, request: GenerateRequest, placement: Placement, engine_id: str, cached_tokens: int
    ) -> None:
        """Hears which engine ran a placed request first, and how much of it that had cached."""


class GenerationClient:
    """Submits requests and follows them to their end, in spite of failures on the way.

    `clock` gives Unix seconds, for deadlines; `monotonic` seconds, for waiting. `placer` places
    requests; without it any engine may take them. `shards` says how many shards a
    model's queue has, each with its part of `limits`; without it one. `side` says which side of
    engines a request is for during a canary; without it the stable one. `turn` says in how many
    seconds a model's engines wake if all of them sleep (None: one is awake). `history` notes what
    becomes of requests. Use from one event loop.
    """

    def __init__(
        self,
        queue: GatewayQueue,
        limits: QueueLimits,
        clock: Callable[[], float] = time.time,
        config: ClientConfig | None = None,
        placer: Placer | None = None,
        shards: CountShards | None = None,
        side: ChooseSide | None = None,
        turn: TimeToTurn | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        history: RequestHistory | None = None,
    ) -> None:
        self.queue = queue
        self._placer = placer
        self._history = history
        self._shards = shards
        self._side = side
        self._turn = turn
        self.ignored: Counter[str] = Counter()  # replies dropped, by reason
        self._limits = limits
        self._clock = clock
        self._config = config or ClientConfig()
        self._now = ListeningClock(self._config.silence / 4, monotonic)
        self._active: dict[str, Generation] = {}
        self._watchdog = Watchdog(
            queue, limits, self._config, self._now, self._active, self._admitted
        )
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._on_end: Callable[[Generation], None] | None = None
        self._late = LateReplies(self._config.silence)
        # of ended requests: the model, and the output tokens that the client was given
        self._given: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._unwritten: set[str] = set()  # of these, those that are not in Redis yet
        self._peer_streams = PeerStreams(queue, self._dispatch, self._on_task_done)
        self._outgoing: asyncio.Queue[tuple[str, str, Control]] = asyncio.Queue()
        self._unnotified: list[Generation] = []
        self._dispatched = -math.inf  # the time when the last frame had been handled
        self._calm = False  # whether a frame came shortly before the current one
        self._callbacks = GenerationCallbacks(
            self._send,
            self._announce,
            self._forget,
            self._abandon,
            self._watchdog.lost,
            self._count,
            self._leave,
            self._note_given,
            self._taken,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._background: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def active(self) -> int:
        """Requests in flight."""
        return len(self._active)

    @property
    def failed(self) -> BaseException | None:
        """The error that ended one of the client's own tasks: the process must be restarted."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                return task.exception() or RuntimeError("a task of the client ended")
        return None

    async def start(self) -> None:
        """Registers the gateway. Raises BackendUnfit, BackendUnavailable."""
        await self.queue.start()
        self._tasks = [
            asyncio.create_task(self._read(), name="frames"),
            asyncio.create_task(self._write(), name="controls"),
            asyncio.create_task(self._beat(), name="beat"),
            asyncio.create_task(self._listen(), name="listening"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_done)

    async def close(self) -> None:
        """Cancels requests in flight, except those that other gateways may continue; ends."""
        for generation in list(self._active.values()):
            if generation.shared:
                generation.leave()
            else:
                await generation.cancel()
        await self._peer_streams.close()
        tasks = [*self._tasks, *self._background]
        if self._watcher is not None:
            tasks.append(self._watcher)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = []
        await self.queue.close()

    def on_end(self, listener: Callable[[Generation], None]) -> None:
        """Has `listener` called with each generation that has ended here. It must not raise."""
        self._on_end = listener

    async def submit(self, request: GenerateRequest) -> Generation:
        """Queues a request, or follows one that is known, to its end.

        Raises QueueFull, RequestConflict, BackendUnavailable.
        """
        if self._side is not None and not is_comparison(request):
            request = replace(request, variant=await self._side(request))
        placement = None if self._placer is None else await self._placer.place(request)
        shards = 1 if self._shards is None else await self._shards(request.model)
        if request.request_id in self._active:
            raise RequestConflict(f"request {request.request_id} is in flight here already")
        generation = Generation(request, self._callbacks, self._now(), placement)
        if self._history is not None and not is_comparison(request):
            generation.timeline = self._history.begin(request, generation.arbiter)
        self._late.begun(request.request_id)
        self._active[request.request_id] = (
            generation  # before the call, since frames may arrive before its reply
        )
        try:
            admission = await self.queue.admit(
                request,
                self._limits.share(shards),
                polite=generation.shared,
                placement=placement,
            )
        except (HeadraceError, asyncio.CancelledError) as error:
            self._active.pop(request.request_id, None)
            if self._history is not None and generation.timeline is not None:
                self._history.forget(request)
            unclear = not isinstance(error, HeadraceError) or isinstance(error, BackendUnavailable)
            if unclear and not generation.shared:
                self._in_background(self._abandon(generation))  # perhaps only the reply was lost
            if isinstance(error, QueueFull):
                await self._wait_for_turn(error, request.model)
            if not isinstance(error, RequestConflict):  # then the id is another request's
                self._drop_images(generation)
            raise
        if not generation.ended:
            self._follow(generation)
            await self._admitted(generation, admission)
        return generation

    async def _wait_for_turn(self, error: QueueFull, model: str) -> None:
        """Makes a refusal count the wait for engines that sleep. The rate at which their queue
        drains will be another one than that of their sleep."""
        wait = None if self._turn is None else await self._turn(model)
        if wait is not None:
            error.retry_after = wait + UNKNOWN_RATE_S

    @property
    def models(self) -> set[str]:
        """The models of the requests in flight."""
        return {generation.request.model for generation in self._active.values()}

    async def withdraw(self, model: str, message: str, *, started: bool) -> None:
        """Ends a model's requests that no engine has begun; with `started` all of them."""
        for generation in list(self._active.values()):
            if generation.request.model == model and (started or not generation.started):
                generation.fail(FailureCode.REMOVED, message)
                await self._abandon(generation)

    # Following a request

    def _follow(self, generation: Generation) -> None:
        rid = generation.request_id
        self._watchdog.begin(rid)
        left = generation.request.deadline_ms / 1000 - self._clock()
        loop = asyncio.get_running_loop()
        self._deadlines[rid] = loop.call_later(max(0.0, left), self._expire, generation)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watchdog.run(), name="watch")
            self._watcher.add_done_callback(self._on_task_done)

    def _expire(self, generation: Generation) -> None:
        if generation.ended:
            return
        generation.fail(FailureCode.DEADLINE, "the request's deadline has passed")
        self._in_background(self._abandon(generation))

    def _forget(self, generation: Generation) -> None:
        rid = generation.request_id
        self._active.pop(rid, None)
        self._watchdog.end(rid)
        if timer := self._deadlines.pop(rid, None):
            timer.cancel()
        self._stop_following()
        if not self._late.has_left(rid):
            self._drop_images(generation)
        self._late.ended(rid, self._now())
        self._remember_given(generation)
        if self._on_end is not None:
            self._on_end(generation)

    def _leave(self, request_id: str) -> None:
        generation = self._active.get(request_id)
        if self._history is not None and generation is not None:
            self._history.forget(generation.request)
        self._late.left(request_id, self._now())

    def _drop_images(self, generation: Generation) -> None:
        """Lets the queue drop the images that only this request needs."""
        if generation.request.images:
            self._in_background(self._drop_stored(generation.request))

    async def _drop_stored(self, request: GenerateRequest) -> None:
        try:
            await self.queue.drop_images(request)
        except BackendUnavailable as error:
            logger.warning(
                "redis unavailable, images are stored until the request's deadline",
                extra={"request_id": request.request_id, "error": str(error)},
            )

    async def _abandon(self, generation: Generation) -> None:
        """Takes a request out of the queue.

        If Redis is unreachable its engine learns it later: every frame of an unknown request is
        answered with Disown.
        """
        given = None if generation.holder is not None else generation.given
        try:
            await self.queue.cancel(generation.request_id, generation.request.model, given)
        except BackendUnavailable as error:
            if given is not None:
                self._unwritten.add(generation.request_id)
            logger.warning(
                "redis unavailable, request not cancelled in the queue",
                extra={"request_id": generation.request_id, "error": str(error)},
            )

    # What clients were given, for the ledger

    def _remember_given(self, generation: Generation) -> None:
        self._given[generation.request_id] = (generation.request.model, generation.given)
        if len(self._given) > REMEMBERED:
            self._given.popitem(last=False)

    def _note_given(self, generation: Generation) -> None:
        self._remember_given(generation)
        self._in_background(self._write_given(generation.request_id))

    async def _write_given(self, request_id: str) -> None:
        """Writes what the client of an ended request was given; later if Redis is unreachable."""
        if (known := self._given.get(request_id)) is None:
            return
        model, given = known
        try:
            await self.queue.note_given(request_id, model, given)
        except BackendUnavailable as error:
            self._unwritten.add(request_id)
            extra = {"request_id": request_id, "error": str(error)}
            logger.warning("redis unavailable, usage is corrected later", extra=extra)

    async def _write_rest_of_given(self) -> None:
        unwritten, self._unwritten = self._unwritten, set()
        for request_id in unwritten:
            await self._write_given(request_id)

    async def _admitted(self, generation: Generation, admission: AdmitResult) -> None:
        """Handles the result of ADMIT for a request."""
        if admission.state is AdmitState.FOLLOWING:
            await self._follow_holder(generation, admission)
            return
        if admission.state is not AdmitState.ENDED:
            self._hold(generation)
            return
        assert admission.outcome is not None, "an ended request has an outcome"
        if not generation.settle(admission.outcome):
            await self._dispute(generation, admission.attempt)

    async def _dispute(self, generation: Generation, attempt: int) -> None:
        """Makes a request continue after the tokens that its client has, if the outcome has other
        tokens.

        Fails the request if other clients were given that outcome.
        """
        seen = max(attempt, generation.arbiter.attempt)
        admission = await self.queue.admit(
            generation.request, self._limits, seen=seen, disputed=True
        )
        if admission.state is not AdmitState.ENDED:
            self._hold(generation)
            await self._watchdog.note_queued_again(generation)
            return
        generation.fail(FailureCode.LOST, "the rest of the answer is lost; send the request again")

    # Requests that other gateways hold

    async def _follow_holder(self, generation: Generation, admission: AdmitResult) -> None:
        """Follows the gateway that has the request; takes the request over if that gateway is
        gone."""
        holder = admission.gateway_id
        assert holder is not None, "a held request has a gateway"
        if not await self.queue.gateway_alive(holder):
            await self._take_over(generation)
        elif holder != generation.holder:
            generation.holder = holder
            self._stop_following()
            await self._peer_streams.add(holder, generation.request.model)
            owner = None if admission.owner is None else (admission.owner, admission.attempt)
            generation.catch_up(owner)

    async def _take_over(self, generation: Generation) -> None:
        """Continues a request whose gateway is gone."""
        await self._catch_up(generation)
        if generation.request_id not in self._active:
            return
        seen = generation.arbiter.attempt
        admission = await self.queue.admit(generation.request, self._limits, seen=seen)
        if generation.request_id in self._active:
            await self._admitted(generation, admission)

    async def _catch_up(self, generation: Generation) -> None:
        """Reads from the journal which tokens the client has, for the next engine that asks this
        gateway. Not needed while the request's engine lives, which reports them itself."""
        owner = generation.arbiter.owner
        if owner is not None and self._watchdog.hears(owner[0], generation.request.model):
            return
        states = await self.queue.journal(generation.request_id, generation.request.model)
        if states is not None:
            generation.adopt(states)

    def _hold(self, generation: Generation) -> None:
        """Notes that the request's replies come to this gateway from now on."""
        if generation.holder is not None:
            generation.holder = None
            self._stop_following()

    def _stop_following(self) -> None:
        """Stops following gateways that have no request in flight here."""
        if self._peer_streams.gateways:
            active = self._active.values()
            self._peer_streams.keep({(g.holder, g.request.model) for g in active if g.holder})

    async def _check_holders(self) -> None:
        for holder in self._peer_streams.gateways:
            if not await self.queue.gateway_alive(holder):
                for generation in [g for g in self._active.values() if g.holder == holder]:
                    with isolated(generation):
                        await self._take_over(generation)

    # Frames

    async def _read(self) -> None:
        async with aclosing(self.queue.frames()) as frames:  # type: ignore[type-var]
            async for frame in frames:
                self._dispatch(frame)

    def _dispatch(self, frame: Frame, holder: str | None = None) -> None:
        """Handles a frame to this gateway, or to `holder`: then only for requests of `holder`."""
        now = self._now()
        self._watchdog.heard[frame.engine_id, frame.model] = now
        self._calm = now - self._dispatched > CALM
        model, engine_id = frame.model, frame.engine_id
        for reply in frame.replies:
            generation = self._active.get(reply.request_id)
            if generation is None:
                if holder is None:
                    self._unknown(frame, reply, now)
            elif model and model != generation.request.model:
                self._count("another_model")
            elif holder is None or generation.holder == holder:
                generation.handle(engine_id, reply, now)
                if self._calm and len(self._unnotified) == TOGETHER:
                    self._notify()
        if self._calm:
            self._notify()
        self._calm, self._dispatched = False, self._now()

    def _announce(self, generation: Generation) -> None:
        """Schedules the call of the generation's listener for when all arrived frames are read.

        If few frames come it is called for some generations at a time, so that the first of many
        streams does not wait for the last.
        """
        if not self._unnotified and not self._calm:
            asyncio.get_running_loop().call_soon(self._notify)
        self._unnotified.append(generation)

    def _notify(self) -> None:
        unnotified, self._unnotified = self._unnotified, []
        for first in range(0, len(unnotified), TOGETHER):
            writes = [each.notify() for each in unnotified[first : first + TOGETHER]]
            for write in writes:
                if write is not None:
                    write()

    def _unknown(self, frame: Frame, reply: Reply, now: float) -> None:
        self._count("unknown_request")
        if disown := self._late.answer(frame.engine_id, reply, now):
            self._send(frame.engine_id, frame.model, disown)
        if self._late.runs_again(reply, now):
            self._in_background(self._write_given(reply.request_id))

    def _taken(self, generation: Generation, engine_id: str, cached_tokens: int) -> None:
        if self._placer is not None and generation.placement is not None:
            self._placer.taken(generation.request, generation.placement, engine_id, cached_tokens)

    def _count(self, reason: str) -> None:
        self.ignored[reason] += 1

    # Control messages

    def _send(self, engine_id: str, model: str, control: Control) -> None:
        self._outgoing.put_nowait((engine_id, model, control))

    async def _write(self) -> None:
        while True:
            engine_id, model, control = await self._outgoing.get()
            try:
                await self.queue.send(engine_id, model, control)
            except BackendUnavailable as error:
                # Nothing is lost: the engine asks again, a gap is detected again, and BEAT reports
                # the same.
                logger.warning("control message not written", extra={"error": str(error)})

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._config.beat_interval)
            try:
                await self.queue.beat()
                await self._check_holders()
                await self._write_rest_of_given()
            except BackendUnavailable as error:
                self._watchdog.unavailable_at = self._now()
                logger.warning("redis unavailable, heartbeat missed", extra={"error": str(error)})

    async def _listen(self) -> None:
        """Advances the clock that stops while the event loop does not run."""
        while True:
            await asyncio.sleep(self._now.interval)
            late = self._now.tick()
            if late > self._config.silence:
                logger.warning("the event loop was blocked", extra={"seconds": round(late, 1)})

    # Tasks

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            return
        logger.critical("a task of the queue client failed", exc_info=task.exception())
        for generation in list(self._active.values()):
            generation.fail(FailureCode.INTERNAL, "the gateway failed")
