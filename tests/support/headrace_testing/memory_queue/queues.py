"""Gateway's and engine's side of a MemoryBackend, which behave like those over Redis."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import suppress

from headrace_common.errors import FailureCode, MessageError, QueueFull
from headrace_common.protocol.attempt_history import AttemptHistory
from headrace_common.protocol.base import (
    LOST_RESERVED_S,
    AdmitResult,
    AdmitState,
    Beat,
    CanaryPlan,
    EngineStatus,
    Lease,
    Outcome,
    Placement,
    Progress,
    QueueDepth,
    QueueLimits,
    QueuePosition,
    RequestStatus,
    TakeBounds,
    TenantUse,
)
from headrace_common.protocol.failures import failed
from headrace_common.protocol.frames import (
    decode_control,
    decode_frame,
    encode_control,
    encode_frame,
)
from headrace_common.protocol.journal import rebuild_from
from headrace_common.protocol.ledger import AttemptUsage
from headrace_common.protocol.redis.framing import frames_of
from headrace_common.protocol.requests import check_shard, queue_full
from headrace_common.protocol.variants import CANARY, STABLE, EngineSide
from headrace_common.wire import keys
from headrace_common.wire.messages import (
    Cancel,
    ChoiceState,
    Control,
    Frame,
    GenerateRequest,
    Reply,
    Reroute,
    decode_request,
)

from .backend import LOW, MemoryBackend
from .images import drop_images, keep_images
from .records import Ending, Record, Taken
from .shards import Log, Shard


async def _entries(log: Log, position: int = 0) -> AsyncIterator[bytes]:
    while True:
        async with log.changed:
            while position == len(log.items):
                await log.changed.wait()
                position = min(position, len(log.items))
        _, data = log.items[position]
        position += 1
        yield data


async def _decoded(messages: AsyncIterator[bytes]) -> AsyncIterator[Frame]:
    async for data in messages:
        yield decode_frame(data)


class MemoryGatewayQueue:
    """One incarnation of a gateway; see GatewayQueue. `clock` is its own, in Unix seconds."""

    def __init__(
        self, backend: MemoryBackend, gateway_id: str, clock: Callable[[], float] | None = None
    ) -> None:
        self.gateway_id = gateway_id
        self._backend = backend
        self._clock = clock or backend.clock

    async def start(self) -> None:
        await self.beat()

    async def admit(
        self,
        request: GenerateRequest,
        limits: QueueLimits,
        *,
        seen: int | None = None,
        polite: bool = False,
        disputed: bool = False,
        placement: Placement | None = None,
    ) -> AdmitResult:
        if request.images:
            keep_images(self._backend, request, None if seen is not None else limits)
        record, former = self._backend.admit(
            request,
            self.gateway_id,
            limits,
            seen,
            polite,
            placement,
            disputed=disputed,
            left=request.deadline_ms / 1000 - self._clock(),
        )
        if record is None:
            raise await self._full(request, of_tenant=former == "tenant")
        await self._backend.wake(_shard(self._backend, request.request_id, request.model))
        if former == "new":
            if seen is not None:
                self._keep_shard(request)
            return AdmitResult(state=AdmitState.ADMITTED)
        if record.ended and former != "following":
            outcome = _outcome(request.request_id, record)
            return AdmitResult(state=AdmitState.ENDED, outcome=outcome, attempt=record.attempt)
        if former == "following":
            return AdmitResult(
                state=AdmitState.FOLLOWING,
                owner=None if record.ended else record.owner or None,
                attempt=record.attempt,
                gateway_id=record.gateway,
            )
        if former and record.owner:
            moved = Reroute(request_id=request.request_id, gateway_id=self.gateway_id)
            await self.send(record.owner, request.model, moved)
        return AdmitResult(
            state=AdmitState.ATTACHED, owner=record.owner or None, attempt=record.attempt
        )

    async def drop_images(self, request: GenerateRequest) -> None:
        drop_images(self._backend, request)

    def _keep_shard(self, request: GenerateRequest) -> None:
        shards = keys.shard_of(request.request_id) + 1
        if 1 < shards >= len(self._backend.shards_of(request.model)):
            until = self._backend.clock() + keys.SHARDS_KEPT_MS / 1000
            self._backend.kept[request.model] = (shards, until)

    async def _full(self, request: GenerateRequest, *, of_tenant: bool) -> QueueFull:
        waiting = (await self.depth(request.model)).waiting
        if of_tenant:
            shards = self._backend.shards_of(request.model)
            waiting = sum(self._backend.waiting_of(shard, request.tenant) for shard in shards)
        rate = await self.drain_rate(request.model)
        return queue_full(request, waiting, rate, tenant=of_tenant)

    def frames(self) -> AsyncIterator[Frame]:
        return _decoded(_entries(self._backend.frames[self.gateway_id]))

    async def frames_to(self, gateway_id: str, model: str) -> AsyncIterator[Frame]:
        log = self._backend.frames[gateway_id]
        return _decoded(_entries(log, len(log.items)))

    async def gateway_alive(self, gateway_id: str) -> bool:
        return self._backend.gateway_alive(gateway_id)

    async def request_status(self, request_id: str, model: str) -> RequestStatus | None:
        record = _shard(self._backend, request_id, model).records.get(request_id)
        if record is None:
            return None
        held = record.undecided and self._backend.clock() - record.lost_at < LOST_RESERVED_S
        outcome = _outcome(request_id, record) if record.ended and not held else None
        return RequestStatus(started=record.state != "queued", outcome=outcome)

    async def deliver_outcome(self, request_id: str, model: str) -> RequestStatus | None:
        record = _shard(self._backend, request_id, model).records.get(request_id)
        if record is not None:
            record.given = record.given or record.state == "done"
        return await self.request_status(request_id, model)

    async def queue_positions(
        self, request_ids: Sequence[str], model: str
    ) -> list[QueuePosition | None]:
        return [await self._queue_position(request_id, model) for request_id in request_ids]

    async def _queue_position(self, request_id: str, model: str) -> QueuePosition | None:
        own, higher = _shard(self._backend, request_id, model), 0
        others = [shard for shard in self._backend.shards_of(model) if shard is not own]
        for queue in own.waiting.values():
            ahead = queue.ahead(request_id)
            if ahead is not None:
                ahead += higher
                ahead += sum(min(ahead, self._backend.waiting(shard)[0]) for shard in others)
                return QueuePosition.after(ahead, await self.drain_rate(model))
            higher += len(queue)
        return None

    async def journal(self, request_id: str, model: str) -> tuple[ChoiceState, ...] | None:
        return _journal(self._backend, request_id, model)

    async def send(self, engine_id: str, model: str, control: Control) -> None:
        self._backend.check()
        await self._backend.controls[engine_id].add(encode_control(control))

    async def cancel(self, request_id: str, model: str, given: int | None = None) -> None:
        owner = self._backend.cancel(_shard(self._backend, request_id, model), request_id, given)
        if owner:
            await self.send(owner, model, Cancel(request_id=request_id))

    async def note_given(self, request_id: str, model: str, given: int) -> None:
        self._backend.note_given(_shard(self._backend, request_id, model), request_id, given)

    async def forget(self, request_ids: Sequence[str], model: str) -> None:
        for request_id in request_ids:
            self._backend.forget(_shard(self._backend, request_id, model), request_id)

    async def release(self, request_id: str, model: str, engine_id: str, attempt: int) -> None:
        shard = _shard(self._backend, request_id, model)
        if self._backend.release(shard, request_id, engine_id, attempt, own=False):
            await self._backend.wake(shard)

    async def depth(self, model: str) -> QueueDepth:
        """The sum over the model's shards."""
        return QueueDepth.of_all([self._depth(each) for each in self._backend.shards_of(model)])

    def _depth(self, shard: Shard) -> QueueDepth:
        waiting, tokens = self._backend.waiting(shard)
        ids = [rid for queue in shard.waiting.values() for rid in queue]
        now = self._backend.clock()
        oldest = min((shard.records[rid].admitted for rid in ids), default=now)
        low = [shard.records[rid] for rid in shard.waiting[LOW]]
        others = [shard.records[rid] for rid in ids if shard.records[rid].priority != LOW]
        first = min(low, key=lambda record: record.admitted, default=None)
        return QueueDepth(
            waiting=waiting,
            waiting_tokens=tokens,
            pending=sum(1 for _ in shard.started()),
            oldest_age=now - oldest,
            dead_letters=len(shard.dead_letters),
            others_oldest_age=now - min((each.admitted for each in others), default=now),
            low_waiting=len(low),
            low_pending=sum(record.priority == LOW for _, record in shard.started()),
            low_time_used=0.0
            if first is None
            else (now - first.admitted) / (first.deadline - first.admitted),
        )

    async def engines(self, model: str) -> Sequence[EngineStatus]:
        return _engines(self._backend, model)

    async def canary_plan(self, model: str) -> CanaryPlan:
        return self._backend.shard(model).canary_plan or CanaryPlan()

    async def drain_rate(self, model: str) -> float:
        now = self._backend.clock()
        return sum(shard.drain_rate(now) for shard in self._backend.shards_of(model))

    async def beat(self) -> None:
        self._backend.check()
        until = self._backend.clock() + keys.GATEWAY_TTL_MS / 1000
        self._backend.gateways[self.gateway_id] = until

    async def close(self) -> None:
        self._backend.gateways.pop(self.gateway_id, None)


class MemoryEngineQueue:
    """One incarnation of an engine, with one shard of its model; see ShardQueue."""

    def __init__(
        self,
        backend: MemoryBackend,
        engine_id: str,
        model: str,
        *,
        shard: int = keys.DEFAULT_SHARD,
        lease_ms: int = keys.LEASE_MS,
        side: EngineSide | None = None,
    ) -> None:
        self.engine_id = engine_id
        self._side = side or EngineSide(alone=True)
        self.shard = shard
        self._backend = backend
        self._model = model
        self._lease = lease_ms / 1000
        self._attempts = AttemptHistory()
        self._adapters: tuple[str, ...] = ()
        self._bounds = TakeBounds()
        self._woken = 0
        self._left: set[str] = set()
        # the time from which any engine may take requests that are placed with another
        self._free_at = math.inf

    async def start(self) -> None:
        self._woken = self._backend.shard(self._model, self.shard).wakeups

    def serve_adapters(self, adapters: Collection[str]) -> None:
        self._adapters = tuple(adapters)

    def limit(self, bounds: TakeBounds) -> None:
        self._bounds = bounds

    async def engines(self) -> Sequence[EngineStatus]:
        return _engines(self._backend, self._model)

    async def take(
        self, count: int, prompt_tokens: int | None = None, low_priority: int | None = None
    ) -> Sequence[Lease]:
        shard = self._backend.shard(self._model, self.shard)
        turn = self._backend.take(
            shard,
            self.engine_id,
            count,
            prompt_tokens,
            self._adapters,
            self._side,
            self._bounds,
            low_priority,
        )
        self._left = self._newest(shard) if turn.stopped else set()
        self._free_at = turn.free_at
        return await self._leases(turn.taken, turn.endings)

    async def image(self, request: GenerateRequest, digest: bytes) -> bytes | None:
        self._backend.check()
        return self._backend.shard(self._model, self.shard).images.get(digest)

    async def reap(self, count: int, *, suspects: bool = True) -> Sequence[Lease]:
        shard = self._backend.shard(self._model, self.shard)
        taken, endings = self._backend.reap(
            shard,
            self.engine_id,
            count,
            self._lease,
            suspects,
            self._adapters,
            self._side,
            self._bounds,
        )
        return await self._leases(taken, endings)

    async def _leases(self, taken: Sequence[Taken], endings: Sequence[Ending]) -> list[Lease]:
        leases = []
        for item in taken:
            try:
                leases.append(self._attempts.check(_lease(item, self.shard)))
            except MessageError:
                message = failed(item.request_id, item.attempt, FailureCode.MALFORMED)
                self._backend.shard(self._model, self.shard).dead_letters.append(
                    (item.request_id, "malformed", 0)
                )
                await self.finish(item.request_id, item.attempt, Outcome(failed=message))
                await self.publish({item.gateway: [message]})
        for end in endings:
            await self.publish({end.gateway: [failed(end.request_id, end.attempt, end.why)]})
        return leases

    async def wait(self) -> None:
        shard = self._backend.shards[self._model, self.shard]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._held_for()), shard.changed:
                while not self._awaited():
                    await shard.changed.wait()
        self._woken = shard.wakeups

    def _held_for(self) -> float | None:
        if self._free_at == math.inf:
            return None
        return max(0.0, self._free_at - self._backend.clock())

    def _awaited(self) -> bool:
        shard = self._backend.shards[self._model, self.shard]
        return shard.wakeups != self._woken or bool(self._newest(shard) - self._left)

    @staticmethod
    def _newest(shard: Shard) -> set[str]:
        """The newest unread entry of each priority, which wakes engines."""
        newest = (queue.newest for queue in shard.waiting.values())
        return {rid for rid in newest if rid is not None}

    @property
    def holds_more(self) -> bool:
        return bool(self._left)

    @property
    def lacks_room(self) -> bool:
        return bool(self._left) and self._free_at == math.inf

    async def beat(self, progress: Sequence[Progress], status: EngineStatus) -> Mapping[str, Beat]:
        shard = self._backend.shard(self._model, self.shard)
        shard.statuses[self.engine_id] = (self._backend.clock() + self._lease, status)
        self._beat_side(shard, takes_work=status.takes_work)
        return await self.renew(progress)

    def _beat_side(self, shard: Shard, *, takes_work: bool) -> None:
        side, beats, now = self._side, shard.side_beats, self._backend.clock()
        other = STABLE if side.variant == CANARY else CANARY
        if takes_work and (side.canary_wanted or side.variant == CANARY):
            beats[side.variant] = now
        side.canary_wanted = shard.canary_plan is not None
        if other in beats:
            side.alone = now - beats[other] > self._lease
        else:
            side.alone = other == CANARY

    async def renew(self, progress: Sequence[Progress]) -> Mapping[str, Beat]:
        shard = self._backend.shard(self._model, self.shard)
        beats = {}
        for item in progress:
            verdict, gateway, journaled = self._backend.beat(shard, self.engine_id, item)
            beats[item.request_id] = Beat(verdict=verdict, gateway_id=gateway, journaled=journaled)
        return beats

    async def tell_shards(self, shards: int) -> int:
        kept = len(self._backend.shards_of(self._model))
        if 1 < shards >= kept:
            until = self._backend.clock() + keys.SHARDS_KEPT_MS / 1000
            self._backend.kept[self._model] = (shards, until)
        return max(shards, kept)

    async def tenant_use(self, apart: float) -> TenantUse | None:
        shard, now = self._backend.shard(self._model, self.shard), self._backend.clock()
        if abs(now - shard.tallied_at) < apart:
            return None
        shard.tallied_at = now
        return shard.counters.tally()

    async def add_tenant_use(self, uses: Mapping[int, TenantUse]) -> None:
        self._backend.shard(self._model, self.shard).counters.share(uses)

    async def journal(self, request_id: str) -> tuple[ChoiceState, ...] | None:
        return _journal(self._backend, request_id, self._model)

    async def resume(self, request_id: str, attempt: int, choices: Sequence[ChoiceState]) -> bool:
        shard = self._backend.shard(self._model, self.shard)
        record = self._backend.owned(shard, request_id, self.engine_id, attempt)
        if record is None or record.state != "running":
            return False
        record.journal = list(choices)
        record.writer = f"{self.engine_id}/{attempt}"
        record.progress = record.progress_at_take = sum(len(c.token_ids) for c in choices)
        record.executing = True
        record.variant, record.weights = self._side.variant, self._side.weights
        record.left_to_side = False
        return True

    async def publish(self, replies: Mapping[str, Sequence[Reply]]) -> None:
        self._backend.check()
        for gateway_id, items in replies.items():
            for part in frames_of(items):
                data = encode_frame(Frame(self.engine_id, tuple(part)))
                await self._backend.frames[gateway_id].add(data)

    async def controls(self) -> AsyncIterator[Control]:
        async for data in _entries(self._backend.controls[self.engine_id]):
            yield decode_control(data)

    async def gateway_alive(self, gateway_id: str) -> bool:
        return self._backend.gateway_alive(gateway_id)

    async def finish(
        self,
        request_id: str,
        attempt: int,
        outcome: Outcome,
        usage: AttemptUsage | None = None,
    ) -> bool:
        shard, used = self._backend.shard(self._model, self.shard), usage or AttemptUsage()
        return self._backend.finish(shard, request_id, self.engine_id, attempt, outcome, used)

    async def give_back(
        self,
        request_ids: Sequence[str],
        *,
        for_own_side: bool = False,
        handed_over: bool = False,
    ) -> None:
        shard = self._backend.shard(self._model, self.shard)
        for request_id in request_ids:
            self._backend.release(
                shard,
                request_id,
                self.engine_id,
                None,
                own=True,
                for_own_side=for_own_side,
                handed_over=handed_over,
            )
        await self._backend.wake(shard)

    async def close(self) -> None:
        self._backend.shards[self._model, self.shard].statuses.pop(self.engine_id, None)


def _engines(backend: MemoryBackend, model: str) -> list[EngineStatus]:
    shard, now = backend.shard(model), backend.clock()
    return [status for until, status in shard.statuses.values() if until > now]


def _journal(backend: MemoryBackend, request_id: str, model: str) -> tuple[ChoiceState, ...] | None:
    record = _shard(backend, request_id, model).records.get(request_id)
    if record is None or record.ended or not record.writer:
        return None
    frames = [
        ((at, 0), decode_frame(data))
        for gateway in dict.fromkeys([*record.former, record.gateway])
        for at, data in backend.frames[gateway].items
    ]
    choices = decode_request(record.payload).sampling.n
    missing = [ChoiceState()] * (choices - len(record.journal))
    return rebuild_from(request_id, record.writer, record.journal + missing, frames)


def _shard(backend: MemoryBackend, request_id: str, model: str) -> Shard:
    return backend.shard(model, keys.shard_of(request_id))


def _lease(item: Taken, shard: int) -> Lease:
    """Raises MessageError."""
    check_shard(item.request_id, shard)
    return Lease(
        request=decode_request(item.payload),
        attempt=item.attempt,
        gateway_id=item.gateway,
        recovered=item.recovered,
        suspect=item.suspect,
        placed=item.placed,
        waited=item.waited,
        left=item.left,
        foreign=item.foreign,
        abandoned=item.abandoned,
    )


def _outcome(request_id: str, record: Record) -> Outcome:
    if record.outcome is not None:
        return record.outcome
    return Outcome(failed=failed(request_id, 0, record.why or FailureCode.INTERNAL))
