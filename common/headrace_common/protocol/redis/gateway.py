"""The gateway's side of the queue over Redis Streams.

Every call may be repeated, because the scripts decide what is done. It has no state of requests.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from redis.exceptions import RedisError, ResponseError

from ...errors import BackendUnavailable, FailureCode, MessageError, RequestConflict
from ...sealing.sealer import PayloadKind, SealingError, opened, sealed
from ...wire import keys
from ...wire.keys import ShardKeys
from ...wire.messages import (
    Cancel,
    ChoiceState,
    Control,
    Frame,
    GenerateRequest,
    Reroute,
    encode_request,
    required_adapter,
    version_of,
)
from ..base import (
    LOST_RESERVED_S,
    AdmitResult,
    AdmitState,
    CanaryPlan,
    EngineStatus,
    Outcome,
    Placement,
    QueueDepth,
    QueueLimits,
    QueuePosition,
    RequestStatus,
)
from ..failures import UNDECIDED, failed
from ..frames import decode_frame, decode_outcome, encode_control, encode_frame
from ..ledger import LedgerBounds
from ..requests import fingerprint, priority_class, queue_full, token_cost
from ..shards import SHARD_FIELDS, shard_note, shards_kept
from ..variants import is_comparison
from .client.client import Command, RedisClient
from .client.connection import Connection, check_backend, translate
from .depth import depth_of, rate_of
from .images import RedisImages
from .journal import JournalReader
from .queue_position import requests_ahead
from .sealing_check import SealingCheck
from .statuses import read_statuses
from .stream_reader import entries
from .variants import RedisCanary

logger = logging.getLogger(__name__)

ADMIT_TRIES = 6  # about a second, in which Redis can restart
TRIES = 3
SHARDS_READ = 5.0  # seconds between two reads of the number of a model's shards


class RedisGatewayQueue:
    """A GatewayQueue over Redis. `shards` is the number of a model's shards; None: as many as
    engines take from.

    A gateway without a beat for `lease_ms` counts as gone. It reads frames of the engines of
    `models`, and of the models for which it has had a request. Its requests are entered in a ledger
    with the bounds `ledger`.
    """

    def __init__(
        self,
        connection: Connection,
        gateway_id: str,
        *,
        shards: int | None = None,
        lease_ms: int = keys.GATEWAY_TTL_MS,
        models: Iterable[str] = (),
        ledger: LedgerBounds | None = None,
    ) -> None:
        self.gateway_id = gateway_id
        self._connection = connection
        self._shards = shards
        self._known: dict[str, tuple[float, list[ShardKeys]]] = {}
        self._lease_ms = lease_ms
        self._ledger = (ledger or LedgerBounds()).field
        self._sealer = connection.sealer
        self._sealing = SealingCheck(connection)
        self._images = RedisImages(connection)
        self._models = dict.fromkeys(models, False)  # whether their engines know this gateway

    async def start(self) -> None:
        """Checks the server and registers the gateway. Raises BackendUnfit, BackendUnavailable."""
        await check_backend(self._connection)
        await self._sealing.start()
        await self.beat()  # before the first deadline is computed: it measures Redis' clock

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
        manner = 2 if disputed else int(polite)
        await self._greet(request.model)
        reply: list[Any] = [b"unknown"]
        if seen is not None:
            reply = await self._admit(request, limits, seen, b"", manner, ())
        if reply[0] == b"unknown":
            if seen is not None:
                await self._keep_shard(request)
            newest = -1 if seen is None else seen
            if request.images:
                await self._images.keep(request, None if seen is not None else limits)
            binding = (request.model, request.request_id)
            payload = await sealed(
                self._sealer, PayloadKind.PAYLOAD, binding, encode_request(request)
            )
            where = _placed(placement)
            reply = await self._admit(request, limits, newest, payload, manner, where)
        return await self._admission(request, reply)

    async def drop_images(self, request: GenerateRequest) -> None:
        await self._images.drop(request)

    async def _greet(self, model: str) -> None:
        """Announces the gateway to the engines of a model before its first request for it."""
        if self._models.setdefault(model, False):
            return
        plain = encode_frame(Frame(self.gateway_id, ()))
        awake = await sealed(self._sealer, PayloadKind.FRAME, (self.gateway_id,), plain)
        await self._pipeline(*self._beat_to(model), self._frame(awake))
        self._models[model] = True

    def _beat_to(self, model: str) -> list[Command]:
        beat = keys.gateway_beat_to(self.gateway_id, model)
        return [
            ("SET", beat, b"", "PX", self._lease_ms),
            ("PEXPIRE", keys.frames(self.gateway_id, model), keys.FRAMES_TTL_MS),
        ]

    def _frame(self, frame: bytes) -> Command:
        """Writes an empty frame to itself, so that its reader asks for the streams' names again."""
        return ("XADD", keys.shared_frames(self.gateway_id), "*", "f", frame)

    async def _keep_shard(self, request: GenerateRequest) -> None:
        """Notes the shard of a request that Redis has lost, so that engines read that shard.

        They may be set to fewer shards, and Redis has lost the note that there were more.
        """
        shard = keys.shard_of(request.request_id)
        if shard == keys.DEFAULT_SHARD:
            return
        now, name = self._connection.clock.now_ms(), ShardKeys(request.model).stats
        (fields,) = await self._pipeline(("HMGET", name, *SHARD_FIELDS))
        if note := shard_note(shard + 1, shards_kept(fields, now), now):
            await self._pipeline(("HSET", name, *note))

    async def _admit(
        self,
        request: GenerateRequest,
        limits: QueueLimits,
        seen: int,
        payload: bytes,
        manner: int,
        where: Sequence[str | float],
    ) -> list[Any]:
        """The reply of ADMIT; for a known request, with the digest that it was queued with."""
        reply: list[Any] = []
        for digest in self._sealer.digests(fingerprint(request)):
            reply = await self._admit_as(digest, request, limits, seen, payload, manner, where)
            if reply[0] != b"conflict":
                break
        return reply

    async def _admit_as(
        self,
        digest: bytes,
        request: GenerateRequest,
        limits: QueueLimits,
        seen: int,
        payload: bytes,
        manner: int,
        where: Sequence[str | float],
    ) -> list[Any]:
        shard = _shard(request.request_id, request.model)
        rid = request.request_id
        arguments = [
            rid,
            self.gateway_id,
            digest,
            request.deadline_ms - self._connection.clock.now_ms(),
            token_cost(request),
            len(request.prompt_token_ids),
            priority_class(request.priority),
            version_of(request),
            limits.max_requests,
            limits.max_tokens,
            seen,
            keys.GRACE_MS,
            payload,
            request.keep_ms,
            manner,
            request.tenant,
            limits.max_tenant_requests,
            f"{request.tenant_weight:g}",
            request.key,
            request.lora or "",
            "" if is_comparison(request) else self._ledger,
            required_adapter(request),
            request.variant,
            *where,
        ]
        names = [shard.record(rid), shard.payload(rid), shard.journal(rid), shard.stats]
        names += [*shard.queues, shard.wakeups, shard.placed, *shard.fairness]
        reply: list[Any] = await self._connection.run("admit", names, arguments, tries=ADMIT_TRIES)
        return reply

    async def _admission(self, request: GenerateRequest, reply: list[Any]) -> AdmitResult:
        rid = request.request_id
        match reply[0]:
            case b"admitted":
                return AdmitResult(state=AdmitState.ADMITTED)
            case b"attached":
                owner, attempt, former = reply[1].decode(), int(reply[2]), reply[3]
                if owner and former:
                    moved = Reroute(request_id=rid, gateway_id=self.gateway_id)
                    await self._tell(owner, request.model, moved)
                return AdmitResult(state=AdmitState.ATTACHED, owner=owner or None, attempt=attempt)
            case b"following":
                return AdmitResult(
                    state=AdmitState.FOLLOWING,
                    owner=reply[1].decode() or None,
                    attempt=int(reply[2]),
                    gateway_id=reply[3].decode(),
                )
            case b"ended":
                outcome = await self._outcome(rid, request.model, *reply[2:4])
                return AdmitResult(state=AdmitState.ENDED, outcome=outcome, attempt=int(reply[4]))
            case b"conflict":
                raise RequestConflict(f"request id {rid} is in use for another request")
            case b"tenant":
                waiting = await self._waiting_of(request, int(reply[1]))
                rate = await self.drain_rate(request.model)
                raise queue_full(request, waiting, rate, tenant=True)
            case _:
                waiting = int(reply[1])
                if len(await self._all(request.model)) > 1:
                    waiting = sum(await self._waiting(request.model))
                raise queue_full(request, waiting, await self.drain_rate(request.model))

    def frames(self) -> AsyncIterator[Frame]:
        """Like GatewayQueue.frames. Unreadable frames are logged and left out."""

        async def first(_client: RedisClient, _name: str, _cursor: str) -> str:
            # From the beginning: frames may come twice, and a promoted replica with a slower clock
            # gives out ids below the ones already read.
            return "0-0"

        return self._frames(self.gateway_id, self._models, first)

    async def frames_to(self, gateway_id: str, model: str) -> AsyncIterator[Frame]:
        """Like GatewayQueue.frames_to. After a reconnect it starts from the beginning."""
        names = _streams(gateway_id, [model])
        newest = await self._pipeline(*(("XREVRANGE", n, "+", "-", "COUNT", 1) for n in names))
        start = {n: last[0][0].decode() for n, last in zip(names, newest, strict=True) if last}

        async def first(_client: RedisClient, name: str, cursor: str) -> str:
            return "0-0" if cursor else start.get(name, "0-0")

        return self._frames(gateway_id, [model], first)

    async def _frames(
        self,
        gateway_id: str,
        models: Iterable[str],
        first: Callable[[RedisClient, str, str], Awaitable[str]],
    ) -> AsyncIterator[Frame]:
        """The frames of all `models`, including those that are added later."""

        streams: dict[str, str] = {}

        async def names(_client: RedisClient) -> Iterable[str]:
            nonlocal streams
            streams = _streams(gateway_id, models)
            return streams

        async for name, fields in entries(self._connection, names, first):
            try:
                data = await opened(
                    self._sealer, PayloadKind.FRAME, (gateway_id,), fields.get(b"f", b"")
                )
                frame = decode_frame(data, streams[name])
            except MessageError as error:
                logger.warning("frame of replies unreadable, skipped", extra={"error": str(error)})
                continue
            if frame.engine_id != gateway_id:
                yield frame

    async def gateway_alive(self, gateway_id: str) -> bool:
        (found,) = await self._pipeline(("EXISTS", keys.gateway_beat(gateway_id)))
        return bool(found)

    async def request_status(self, request_id: str, model: str) -> RequestStatus | None:
        record = _shard(request_id, model).record(request_id)
        asked = ("HMGET", record, "st", "why", "out", "lt")
        ((state, why, outcome, lost_at),) = await self._pipeline(asked)
        return await self._request_status(request_id, model, state, why, outcome, lost_at)

    async def deliver_outcome(self, request_id: str, model: str) -> RequestStatus | None:
        record = _shard(request_id, model).record(request_id)
        found = await self._connection.run("giveout", [record], [], tries=TRIES)
        return await self._request_status(request_id, model, *found) if found else None

    async def _request_status(
        self,
        request_id: str,
        model: str,
        state: bytes | None,
        why: bytes | None,
        outcome: bytes | None,
        lost_at: bytes | None,
    ) -> RequestStatus | None:
        if state is None:
            return None
        if state in (b"queued", b"running") or self._is_reserved(why, lost_at):
            return RequestStatus(started=state != b"queued")
        ended = await self._outcome(request_id, model, why, outcome)
        return RequestStatus(started=True, outcome=ended)

    async def _outcome(
        self, request_id: str, model: str, why: bytes | None, stored: bytes | None
    ) -> Outcome:
        """The stored outcome, or that of a request that a script ended without storing one."""
        if not stored:
            code = FailureCode(why.decode()) if why else FailureCode.INTERNAL
            return Outcome(failed=failed(request_id, 0, code))
        try:
            return decode_outcome(
                await opened(self._sealer, PayloadKind.OUTCOME, (model, request_id), stored)
            )
        except SealingError as error:
            logger.error(
                "outcome cannot be opened", extra={"request_id": request_id, "error": str(error)}
            )
            return Outcome(failed=failed(request_id, 0, FailureCode.SEALED))

    def _is_reserved(self, why: bytes | None, lost_at: bytes | None) -> bool:
        """Whether an ended request is left to its gateway, which may queue it again."""
        if not why or not lost_at or why.decode() not in UNDECIDED:
            return False
        return self._connection.clock.now() - int(lost_at) / 1000 < LOST_RESERVED_S

    async def queue_positions(
        self, request_ids: Sequence[str], model: str
    ) -> list[QueuePosition | None]:
        """Like GatewayQueue.queue_positions; each other shard is assumed to have as many before
        a request."""
        found = await requests_ahead(self._pipeline, model, request_ids)
        if not found:
            return [None] * len(request_ids)
        counts = await self._waiting(model) if len(await self._all(model)) > 1 else []
        rate = await self.drain_rate(model)

        def position(request_id: str) -> QueuePosition | None:
            if (ahead := found.get(request_id)) is None:
                return None
            own = keys.shard_of(request_id)
            others = sum(min(ahead, n) for shard, n in enumerate(counts) if shard != own)
            return QueuePosition.after(ahead + others, rate)

        return list(map(position, request_ids))

    async def journal(self, request_id: str, model: str) -> tuple[ChoiceState, ...] | None:
        journal = JournalReader(self._pipeline, self._sealer, model)
        return await journal.read(_shard(request_id, model), request_id)

    async def send(self, engine_id: str, model: str, control: Control) -> None:
        key = keys.controls(engine_id, model)
        data = await sealed(
            self._sealer, PayloadKind.CONTROL, (engine_id,), encode_control(control)
        )
        write = ("XADD", key, "MAXLEN", "~", keys.CONTROLS_KEPT, "*", "c", data)
        written, _ = await self._pipeline(
            write, ("PEXPIRE", key, keys.CONTROLS_TTL_MS), raise_on_error=False
        )
        if isinstance(written, ResponseError):
            if (failed := translate(written)) is not None:
                raise failed
            # The model's engines may write this key, and have changed its type.
            logger.warning("control message not sent", extra={"error": str(written)})

    async def cancel(self, request_id: str, model: str, given: int | None = None) -> None:
        shard = _shard(request_id, model)
        names = [
            shard.record(request_id),
            shard.payload(request_id),
            shard.journal(request_id),
            shard.stats,
            *shard.queues,
            shard.ledger,
            shard.placed,
            *shard.fairness,
        ]
        arguments = [keys.ENDED_TTL_MS, request_id, "" if given is None else given]
        _, owner = await self._connection.run("cancel", names, arguments, tries=TRIES)
        if owner:
            await self._tell(owner.decode(), model, Cancel(request_id=request_id))

    async def note_given(self, request_id: str, model: str, given: int) -> None:
        shard = _shard(request_id, model)
        names = [shard.record(request_id), shard.ledger]
        await self._connection.run("given", names, [request_id, given], tries=TRIES)

    async def forget(self, request_ids: Sequence[str], model: str) -> None:
        records = [_shard(rid, model).record(rid) for rid in request_ids]
        await self._pipeline(*(("PEXPIRE", record, keys.FORGOTTEN_MS) for record in records))

    async def _tell(self, engine_id: str, model: str, control: Control) -> None:
        """Sends a control message, best effort: the engine's next BEAT reports the same."""
        try:
            await self.send(engine_id, model, control)
        except BackendUnavailable as error:
            logger.warning("control message not sent", extra={"error": str(error)})

    async def release(self, request_id: str, model: str, engine_id: str, attempt: int) -> None:
        shard = _shard(request_id, model)
        await self._connection.run(
            "giveback",
            [shard.record(request_id), shard.wakeups, *shard.queues],
            [request_id, engine_id, attempt, 0, 0, 0],
            tries=TRIES,
        )

    async def _all(self, model: str) -> list[ShardKeys]:
        """The model's shards that may hold requests."""
        if self._shards is not None:
            return [ShardKeys(model, number) for number in range(self._shards)]
        read_at, known = self._known.get(model, (-math.inf, []))
        if time.monotonic() - read_at >= SHARDS_READ:
            (fields,) = await self._pipeline(("HMGET", ShardKeys(model).stats, *SHARD_FIELDS))
            found = range(shards_kept(fields, self._connection.clock.now_ms()))
            known = [ShardKeys(model, number) for number in found]
            self._known[model] = (time.monotonic(), known)
        return known

    async def _waiting(self, model: str) -> list[int]:
        """The number of waiting requests in each shard."""
        shards = await self._all(model)
        counts = await self._pipeline(*(("HGET", shard.stats, "w") for shard in shards))
        return [max(0, int(count or 0)) for count in counts]

    async def _waiting_of(self, request: GenerateRequest, own: int) -> int:
        """The number of waiting requests of the request's tenant, `own` of them in its shard."""
        shards = await self._all(request.model)
        if len(shards) == 1:
            return own
        counts = await self._pipeline(
            *(("ZSCORE", shard.tenants, request.tenant) for shard in shards)
        )
        return sum(int(float(count or 0)) for count in counts)

    async def depth(self, model: str) -> QueueDepth:
        """The sum over the model's shards."""
        shards = await self._all(model)
        parts = await asyncio.gather(*(depth_of(self._pipeline, shard) for shard in shards))
        return QueueDepth.of_all(parts)

    async def engines(self, model: str) -> Sequence[EngineStatus]:
        return await read_statuses(self._pipeline, model)

    async def canary_plan(self, model: str) -> CanaryPlan:
        return await RedisCanary(self._connection).plan(model)

    async def drain_rate(self, model: str) -> float:
        shards = await self._all(model)
        return sum(await asyncio.gather(*(rate_of(self._pipeline, shard) for shard in shards)))

    async def beat(self) -> None:
        await self._pipeline(
            ("SET", keys.gateway_beat(self.gateway_id), b"", "PX", self._lease_ms),
            ("PEXPIRE", keys.shared_frames(self.gateway_id), keys.FRAMES_TTL_MS),
            *(command for model in self._models for command in self._beat_to(model)),
        )
        await self._sealing.keep()
        await self._connection.measure_clock(keys.gateway_beat(self.gateway_id))

    async def _pipeline(self, *commands: Command, raise_on_error: bool = True) -> list[Any]:
        """Commands that may be repeated, in one round trip. Raises BackendUnavailable."""
        return await self._connection.attempt(
            lambda: self._connection.client.pipeline(commands, raise_on_error=raise_on_error),
            tries=TRIES,
        )

    async def close(self) -> None:
        try:
            beats = [keys.gateway_beat_to(self.gateway_id, model) for model in self._models]
            beat = keys.gateway_beat(self.gateway_id)
            await self._connection.client.command("DEL", *dict.fromkeys([beat, *beats]))
        except RedisError as error:
            logger.warning("redis unavailable at close", extra={"error": str(error)})
        await self._connection.close()


def _placed(placement: Placement | None) -> list[str | float]:
    """ADMIT's arguments for a placement."""
    if placement is None:
        return []
    shards = placement.shards
    arguments: list[str | float] = [placement.load_factor, placement.hold_ms]
    arguments.append(placement.capacity / shards)
    for candidate in placement.candidates:
        arguments += [candidate.engine_id, candidate.capacity / shards]
    return arguments


def _streams(gateway_id: str, models: Iterable[str]) -> dict[str, str]:
    """The streams of frames to a gateway, each with the model whose engines write to it."""
    own = {keys.frames(gateway_id, model): model for model in models}
    return {keys.shared_frames(gateway_id): "", **own}


def _shard(request_id: str, model: str) -> ShardKeys:
    return ShardKeys(model, keys.shard_of(request_id))
