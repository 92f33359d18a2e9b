"""An engine without a model: it speaks the real queue protocol, and its random tokens carry their
history.

Every token holds a checksum of all tokens before it, so that a lost, repeated or foreign token
shows in the text that a client got. It keeps the order of the real worker: take or reap, ask the
gateway (Takeover) where others may have run it, RESUME, run, publish, beat, FINISH.
"""

import asyncio
import itertools
import random
import struct
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headrace_common.errors import BackendUnavailable, FailureCode
from headrace_common.protocol.base import (
    Beat,
    EngineQueue,
    EngineStatus,
    Lease,
    Outcome,
    Progress,
    Verdict,
)
from headrace_common.wire.messages import (
    Cancel,
    ChoiceState,
    Control,
    Disown,
    Drain,
    Failed,
    GenerateRequest,
    Recall,
    Reply,
    Reroute,
    Resend,
    Resume,
    StopChoice,
    Sync,
    Takeover,
    Tokens,
    Watch,
    pack_tokens,
)

POISON_TOKEN = 666  # a prompt with this token ends the engine that runs it


def next_token(choice: int, before: Sequence[int], rng: random.Random) -> int:
    """A random token whose low 16 bits are a checksum of the choice and all tokens before it."""
    return rng.getrandbits(15) << 16 | checksum(choice, before)


def checksum(choice: int, tokens: Sequence[int]) -> int:
    return zlib.crc32(pack_tokens(tokens), choice) & 0xFFFF


def is_one_history(choice: int, tokens: Sequence[int]) -> bool:
    """Whether every token carries the checksum of those before it."""
    return all(token & 0xFFFF == checksum(choice, tokens[:i]) for i, token in enumerate(tokens))


@dataclass(slots=True)
class FakeChoice:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    journaled: int = 0
    embedding: bytes | None = None

    def state(self) -> ChoiceState:
        return ChoiceState(
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            embedding=self.embedding,
        )


class FakeRequest:
    """One leased request."""

    def __init__(self, lease: Lease, script: Sequence[int] | None = None) -> None:
        self.lease = lease
        self.script = script
        self.rid = lease.request.request_id
        self.gateway_id = lease.gateway_id
        self.running = False
        self.round = 0
        self.answer: asyncio.Future[Resume] | None = None
        self.choices = [FakeChoice() for _ in range(lease.request.sampling.n)]

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def states(self) -> tuple[ChoiceState, ...]:
        return tuple(choice.state() for choice in self.choices)

    def restore(self, states: Sequence[ChoiceState]) -> None:
        self.choices = [
            FakeChoice(list(s.token_ids), s.finish_reason, len(s.token_ids), s.embedding)
            for s in states
        ]

    def tokens(self, number: int, index: int) -> Tokens:
        choice = self.choices[number]
        return Tokens(
            request_id=self.rid,
            attempt=self.lease.attempt,
            choice=number,
            index=index,
            token_ids=tuple(choice.token_ids[index:]),
            finish_reason=choice.finish_reason,
            embedding=choice.embedding,
            round=self.round,
        )

    def step(self, rng: random.Random) -> list[Reply]:
        replies: list[Reply] = []
        most = self.lease.request.sampling.max_tokens or 16
        pooling = self.lease.request.pooling
        if pooling is not None and self.choices[0].finish_reason is None:
            numbers = [rng.random() for _ in range(pooling.dimensions or 8)]  # never the same twice
            self.choices[0].embedding = struct.pack(f"<{len(numbers)}f", *numbers)
            self.choices[0].finish_reason = "stop"
            return [self.tokens(0, 0)]
        for number, choice in enumerate(self.choices):
            if choice.finish_reason is None:
                self._extend(number, choice, rng)
                if len(choice.token_ids) >= most:
                    choice.finish_reason = choice.finish_reason or "length"
                replies.append(self.tokens(number, len(choice.token_ids) - 1))
        return replies

    def _extend(self, number: int, choice: FakeChoice, rng: random.Random) -> None:
        before = choice.token_ids
        if self.script is None:
            before.append(next_token(number, before, rng))
            return
        before.append(self.script[len(before)])
        if len(before) == len(self.script):
            choice.finish_reason = "stop"

    def progress(self) -> Progress:
        states = [
            ChoiceState(token_ids=tuple(c.token_ids[c.journaled :]), finish_reason=c.finish_reason)
            for c in self.choices
        ]
        return Progress(
            request_id=self.rid,
            attempt=self.lease.attempt,
            journaled=tuple(c.journaled for c in self.choices),
            choices=tuple(states),
            executing=self.running,
        )


class EngineDied(Exception):
    """The engine ran a poisonous request."""


class FakeEngine:
    """An engine with `slots` requests at once and one step each `token_delay` seconds.

    `run()` serves until drained or killed (its task cancelled); `freeze()` stops every loop as
    SIGSTOP would, `thaw()` lets them continue.
    """

    def __init__(
        self,
        queue: EngineQueue,
        model: str,
        *,
        slots: int = 16,
        token_delay: float = 0.01,
        beat_interval: float = 3.0,
        resume_timeout: float = 0.5,
        seed: int = 0,
        variant: str = "",
    ) -> None:
        self.queue = queue
        self.active: dict[str, FakeRequest] = {}
        self.token_delay = token_delay
        self.images: list[bytes] = []  # all that it has read, for each request that names them
        self.script: Callable[[GenerateRequest], Sequence[int]] | None = None  # complete outputs
        self._model = model
        self._variant = variant
        self._slots = slots
        self._beat_interval = beat_interval
        self._resume_timeout = resume_timeout
        self._rng = random.Random(seed)
        self._rounds = itertools.count(1)
        self._outbox: defaultdict[str, list[Reply]] = defaultdict(list)
        self._endings: list[tuple[FakeRequest, Outcome]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._busy = asyncio.Event()
        self._changed = asyncio.Event()
        self._draining = asyncio.Event()

    def freeze(self) -> None:
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    def lose(self) -> None:
        """Ends all its requests, like an engine that finds neither their gateways nor a journal."""
        for request in list(self.active.values()):
            self._fail(request, FailureCode.LOST)

    def drain(self) -> None:
        self._draining.set()
        self._changed.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeEngine"]:
        """Runs it until the block ends."""
        task = asyncio.create_task(self.run())
        yield self
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def run(self) -> None:
        """Raises EngineDied where a request is poisonous."""
        await self._persist(self.queue.start)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(loop())
                    for loop in (self._intake, self._steps, self._beats, self._controls)
                ]
                await self._draining.wait()
                await self._give_back()
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as failed:
            if failed.subgroup(EngineDied) is None:
                raise
            raise EngineDied from failed
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _persist(self, action: Callable[[], Awaitable[object]]) -> None:
        while True:
            await self._thawed.wait()
            try:
                await action()
            except BackendUnavailable:
                await asyncio.sleep(0.02)
            else:
                return

    # Intake

    def _room(self) -> int:
        if self._draining.is_set() or any(r.lease.suspect for r in self.active.values()):
            return 0
        return self._slots - len(self.active)

    async def _intake(self) -> None:
        while True:
            await self._thawed.wait()
            self._changed.clear()
            if self._room() <= 0:
                await self._changed.wait()
                continue
            try:
                leases = [*await self.queue.take(self._room())]
                if self._room() > len(leases):
                    leases += await self.queue.reap(self._room() - len(leases))
                for lease in leases:
                    self._begin(lease)
                if not leases:
                    await self.queue.wait()
            except BackendUnavailable:
                await asyncio.sleep(0.02)

    def _begin(self, lease: Lease) -> None:
        request = FakeRequest(lease, self.script and self.script(lease.request))
        self._stop(self.active.get(request.rid))
        self.active[request.rid] = request
        if lease.recovered or lease.suspect:
            self._spawn(self._take_over(request))
        else:
            self._spawn(self._start(request))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, request: FakeRequest) -> None:
        """Reports that it executes the request, and then does."""
        if not await self._has_images(request):
            return
        request.running = True
        await self._persist(lambda: self._beat([request]))
        self._busy.set()

    async def _has_images(self, request: FakeRequest) -> bool:
        """Reads the request's images; ends the request if the queue has lost one of them."""
        asked = request.lease.request
        for image in asked.images:
            found: bytes | None = None

            async def read(digest: bytes = image.digest) -> None:
                nonlocal found
                found = await self.queue.image(asked, digest)

            await self._persist(read)
            if found is None:
                self._fail(request, FailureCode.LOST)
                return False
            self.images.append(found)
        return True

    # Recovery

    async def _take_over(self, request: FakeRequest) -> None:
        while request.lease.suspect and len(self.active) > 1:
            self._changed.clear()
            await self._changed.wait()
        states = await self._said_so_far(request)
        if states is None or self.active.get(request.rid) is not request:
            return
        if not await self._has_images(request):
            return
        owned = False

        async def resume() -> None:
            nonlocal owned
            owned = await self.queue.resume(request.rid, request.lease.attempt, states)

        await self._persist(resume)
        if not owned:
            self._drop(request)
            return
        request.restore(states)
        request.running = True
        if request.finished:
            self._end(request)
        self._busy.set()

    async def _said_so_far(self, request: FakeRequest) -> Sequence[ChoiceState] | None:
        while self.active.get(request.rid) is request:
            request.round = next(self._rounds)
            request.answer = asyncio.get_running_loop().create_future()
            self._put(
                request.gateway_id,
                Takeover(
                    request_id=request.rid,
                    attempt=request.lease.attempt,
                    round=request.round,
                    rounds_in_tokens=True,
                ),
            )
            try:
                async with asyncio.timeout(self._resume_timeout):
                    return (await request.answer).choices
            except TimeoutError:
                pass
            finally:
                request.answer = None
            states = await self._from_journal(request)
            if states is not None:
                return states
        return None

    async def _from_journal(self, request: FakeRequest) -> Sequence[ChoiceState] | None:
        try:
            if await self.queue.gateway_alive(request.gateway_id):
                return None
            states = await self.queue.journal(request.rid)
        except BackendUnavailable:
            return None
        if states is None:
            self._fail(request, FailureCode.LOST)
        return states

    # Steps

    async def _steps(self) -> None:
        while True:
            await self._thawed.wait()
            running = [r for r in self.active.values() if r.running]
            if not running and not self._outbox and not self._endings:
                self._busy.clear()
                await self._busy.wait()
                continue
            for request in running:
                if POISON_TOKEN in request.lease.request.prompt_token_ids:
                    raise EngineDied
                for reply in request.step(self._rng):
                    self._outbox[request.gateway_id].append(reply)
                if request.finished:
                    self._end(request)
            await self._flush()
            await asyncio.sleep(self.token_delay)

    async def _flush(self) -> None:
        replies, self._outbox = self._outbox, defaultdict(list)
        endings, self._endings = self._endings, []
        if replies:
            await self._persist(lambda: self.queue.publish(replies))
        for request, outcome in endings:
            await self._finish(request, outcome)

    async def _finish(self, request: FakeRequest, outcome: Outcome) -> None:
        await self._persist(lambda: self.queue.finish(request.rid, request.lease.attempt, outcome))

    def _put(self, gateway_id: str, reply: Reply) -> None:
        self._outbox[gateway_id].append(reply)
        self._busy.set()

    def _end(self, request: FakeRequest) -> None:
        self._endings.append((request, Outcome(choices=request.states())))
        self._busy.set()
        self._drop(request)

    def _fail(self, request: FakeRequest, failure: FailureCode) -> None:
        message = Failed(
            request_id=request.rid,
            attempt=request.lease.attempt,
            failure=failure,
            message=failure.value,
        )
        self._put(request.gateway_id, message)
        self._endings.append((request, Outcome(failed=message)))
        self._drop(request)

    def _drop(self, request: FakeRequest) -> None:
        self._stop(request)
        if self.active.get(request.rid) is request:
            del self.active[request.rid]
        self._changed.set()

    @staticmethod
    def _stop(request: FakeRequest | None) -> None:
        if request is not None:
            request.running = False

    # Beats

    async def _beats(self) -> None:
        """Sends signs of life four times between beats: what the real engine sends each second."""
        count = 0
        while True:
            await self._thawed.wait()
            try:
                alive = {r.gateway_id: () for r in self.active.values()}
                await self.queue.publish(alive)
                if count % 4 == 0:
                    await self._beat(list(self.active.values()))
                    self._changed.set()
                    if self._room() > 0:
                        for lease in await self.queue.reap(self._room()):
                            self._begin(lease)
            except BackendUnavailable:
                pass
            count += 1
            await asyncio.sleep(self._beat_interval / 4)

    async def _beat(self, requests: Sequence[FakeRequest]) -> None:
        beats = await self.queue.beat([r.progress() for r in requests], self._status())
        await self._thawed.wait()
        for request in requests:
            if self.active.get(request.rid) is request:
                self._heed(request, beats[request.rid])

    def _heed(self, request: FakeRequest, beat: Beat) -> None:
        match beat.verdict:
            case Verdict.OWNED:
                for choice, count in zip(request.choices, beat.journaled, strict=True):
                    choice.journaled = min(count, len(choice.token_ids))
                self._reroute(request, beat.gateway_id)
            case Verdict.STOLEN:
                self._drop(request)
            case Verdict.CANCELLED:
                self._fail(request, FailureCode.CANCELLED)
            case Verdict.EXPIRED:
                self._fail(request, FailureCode.DEADLINE)
            case Verdict.MISSING:
                pass

    def _status(self) -> EngineStatus:
        return EngineStatus(
            engine_id=self.queue.engine_id,
            model=self._model,
            max_model_len=4096,
            running=len(self.active),
            capacity=self._slots,
            kv_utilization=len(self.active) / self._slots,
            tokens_per_second=0.0,
            last_step_age=0.0,
            draining=self._draining.is_set(),
            version="fake",
            variant=self._variant,
        )

    async def _give_back(self) -> None:
        await self._persist(lambda: self._beat(list(self.active.values())))
        ids = list(self.active)
        for request in list(self.active.values()):
            self._drop(request)
        await self._flush()
        await self._persist(lambda: self.queue.give_back(ids))

    # Control messages

    async def _controls(self) -> None:
        async for control in self.queue.controls():
            await self._thawed.wait()
            assert not isinstance(control, Recall | Watch), "for no fake engine"
            if isinstance(control, Drain):
                self.drain()
            elif (request := self.active.get(control.request_id)) is not None:
                self._obey(request, control)

    def _obey(self, request: FakeRequest, control: Control) -> None:
        match control:
            case Resume() if control.attempt == request.lease.attempt:
                self._resumed(request, control)
            case Disown() if control.attempt == request.lease.attempt:
                if control.superseded:
                    self._drop(request)
                else:
                    self._spawn(self._disowned(request))
            case Cancel():
                self._fail(request, FailureCode.CANCELLED)
            case StopChoice():
                request.choices[control.choice].finish_reason = "stop"
                if request.finished and request.running:
                    self._end(request)
            case Resend() if request.running:
                self._put(request.gateway_id, request.tokens(control.choice, control.index))
            case Reroute():
                self._reroute(request, control.gateway_id)

    def _resumed(self, request: FakeRequest, resume: Resume) -> None:
        if request.answer is not None:
            if resume.round == request.round and not request.answer.done():
                request.answer.set_result(resume)
        elif resume.round == 0 and request.running:
            request.running = False
            self._spawn(self._take_over(request))

    async def _disowned(self, request: FakeRequest) -> None:
        """Handles a request that its gateway does not know: BEAT may name another gateway."""
        gateway_id = request.gateway_id
        await self._persist(lambda: self._beat([request]))
        if self.active.get(request.rid) is request and request.gateway_id == gateway_id:
            self._fail(request, FailureCode.ABANDONED)

    def _reroute(self, request: FakeRequest, gateway_id: str) -> None:
        if gateway_id and gateway_id != request.gateway_id:
            request.gateway_id = gateway_id
            if request.running:
                self._put(
                    gateway_id,
                    Sync(
                        request_id=request.rid,
                        attempt=request.lease.attempt,
                        choices=request.states(),
                    ),
                )
