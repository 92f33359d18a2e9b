"""The gateway's side of the queue over Redis Streams.

Everything here may be repeated: the scripts decide what is done. Holds no state of requests.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from redis.exceptions import RedisError

from .. import keys
from ..errors import BackendUnavailable, FailureCode, MessageError, RequestConflict
from ..frames import decode_frame, decode_outcome, encode_control
from ..keys import ShardKeys
from ..messages import (
    PROTOCOL_VERSION,
    Cancel,
    ChoiceState,
    Control,
    Frame,
    GenerateRequest,
    Reroute,
    encode_request,
)
from .base import (
    LOST_HELD_S,
    Admission,
    AdmitState,
    EngineStatus,
    Outcome,
    Place,
    Placement,
    QueueDepth,
    QueueLimits,
    Standing,
)
from .client import Client, Command
from .connection import Connection, check_backend, entries
from .failures import UNDECIDED, failed
from .redis_depth import depth_of, rate_of
from .redis_journal import read_journal
from .redis_place import requests_ahead
from .requests import fingerprint, priority_class, queue_full, token_cost
from .shards import SHARD_FIELDS, shard_note, shards_kept
from .status import decode_status

logger = logging.getLogger(__name__)

ADMIT_TRIES = 6  # about a second: a restart of Redis goes by unseen
TRIES = 3
SHARDS_READ = 5.0  # seconds between two looks how many shards a model has


class RedisGatewayQueue:
    """One incarnation of a gateway; see GatewayQueue. `shards` is how many a model's queue has;
    None: as many as its engines say.

    A gateway that did not beat for `lease_ms` counts as gone.
    """

    def __init__(
        self,
        connection: Connection,
        gateway_id: str,
        *,
        shards: int | None = None,
        lease_ms: int = keys.GATEWAY_TTL_MS,
    ) -> None:
        self.gateway_id = gateway_id
        self._connection = connection
        self._shards = shards
        self._known: dict[str, tuple[float, list[ShardKeys]]] = {}
        self._lease_ms = lease_ms

    async def start(self) -> None:
        """Checks the server, registers the gateway. Raises BackendUnfit, BackendUnavailable."""
        await check_backend(self._connection)
        await self.beat()  # before the first deadline: it measures Redis' clock

    async def admit(
        self,
        request: GenerateRequest,
        limits: QueueLimits,
        *,
        seen: int | None = None,
        polite: bool = False,
        disputed: bool = False,
        placement: Placement | None = None,
    ) -> Admission:
        manner = 2 if disputed else int(polite)
        reply: list[Any] = [b"unknown"]
        if seen is not None:
            reply = await self._admit(request, limits, seen, b"", manner, ())
        if reply[0] == b"unknown":
            if seen is not None:
                await self._keep_shard(request)
            newest = -1 if seen is None else seen
            payload, where = encode_request(request), _placed(placement)
            reply = await self._admit(request, limits, newest, payload, manner, where)
        return await self._admission(request, reply)

    async def _keep_shard(self, request: GenerateRequest) -> None:
        """Has engines look into the shard of a request that Redis has lost, where they are set to
        fewer and Redis has forgotten with it that there were more."""
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
        shard = _shard(request.request_id, request.model)
        rid = request.request_id
        arguments = [
            rid,
            self.gateway_id,
            fingerprint(request),
            request.deadline_ms - self._connection.clock.now_ms(),
            token_cost(request),
            len(request.prompt_token_ids),
            priority_class(request.priority),
            PROTOCOL_VERSION,
            limits.max_requests,
            limits.max_tokens,
            seen,
            keys.GRACE_MS,
            payload,
            request.keep_ms,
            manner,
            request.tenant,
            limits.max_tenant_requests,
            *where,
        ]
        names = [shard.record(rid), shard.payload(rid), shard.journal(rid), shard.stats]
        names += [*shard.queues, shard.wakeups, shard.placed, *shard.fairness]
        reply: list[Any] = await self._connection.run("admit", names, arguments, tries=ADMIT_TRIES)
        return reply

    async def _admission(self, request: GenerateRequest, reply: list[Any]) -> Admission:
        rid = request.request_id
        match reply[0]:
            case b"admitted":
                return Admission(state=AdmitState.ADMITTED)
            case b"attached":
                owner, attempt, former = reply[1].decode(), int(reply[2]), reply[3]
                if owner and former:
                    await self._tell(owner, Reroute(request_id=rid, gateway_id=self.gateway_id))
                return Admission(state=AdmitState.ATTACHED, owner=owner or None, attempt=attempt)
            case b"held":
                return Admission(
                    state=AdmitState.HELD,
                    owner=reply[1].decode() or None,
                    attempt=int(reply[2]),
                    gateway_id=reply[3].decode(),
                )
            case b"ended":
                outcome = _outcome(rid, *reply[2:4])
                return Admission(state=AdmitState.ENDED, outcome=outcome, attempt=int(reply[4]))
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
        """As GatewayQueue.frames. What cannot be read is logged and left out."""

        async def first(client: Client, _cursor: str) -> str:
            # From the beginning: frames may come twice, and a promoted replica with a slower clock
            # gives out ids below the ones already read.
            return "0-0"

        return self._frames(self.gateway_id, first)

    async def frames_to(self, gateway_id: str) -> AsyncIterator[Frame]:
        """As GatewayQueue.frames_to. After a reconnect from the beginning, as one's own."""
        (newest,) = await self._pipeline(
            ("XREVRANGE", keys.frames(gateway_id), "+", "-", "COUNT", 1)
        )
        start = newest[0][0].decode() if newest else "0-0"

        async def first(_client: Client, cursor: str) -> str:
            return "0-0" if cursor else start

        return self._frames(gateway_id, first)

    async def _frames(
        self, gateway_id: str, first: Callable[[Client, str], Awaitable[str]]
    ) -> AsyncIterator[Frame]:
        async for _, fields in entries(self._connection, keys.frames(gateway_id), first):
            try:
                yield decode_frame(fields.get(b"f", b""))
            except MessageError as error:
                logger.warning("frame refused", extra={"error": str(error)})

    async def gateway_alive(self, gateway_id: str) -> bool:
        (found,) = await self._pipeline(("EXISTS", keys.gateway_beat(gateway_id)))
        return bool(found)

    async def standing(self, request_id: str, model: str) -> Standing | None:
        record = _shard(request_id, model).record(request_id)
        asked = ("HMGET", record, "st", "why", "out", "lt")
        ((state, why, outcome, lost_at),) = await self._pipeline(asked)
        return self._standing(request_id, state, why, outcome, lost_at)

    async def give_out(self, request_id: str, model: str) -> Standing | None:
        record = _shard(request_id, model).record(request_id)
        found = await self._connection.run("giveout", [record], [], tries=TRIES)
        return self._standing(request_id, *found) if found else None

    def _standing(
        self,
        request_id: str,
        state: bytes | None,
        why: bytes | None,
        outcome: bytes | None,
        lost_at: bytes | None,
    ) -> Standing | None:
        if state is None:
            return None
        if state in (b"queued", b"running") or self._is_held(why, lost_at):
            return Standing(started=state != b"queued")
        return Standing(started=True, outcome=_outcome(request_id, why, outcome))

    def _is_held(self, why: bytes | None, lost_at: bytes | None) -> bool:
        """Whether a request that has ended is left to its gateway, which may have it go on."""
        if not why or not lost_at or why.decode() not in UNDECIDED:
            return False
        return self._connection.clock.now() - int(lost_at) / 1000 < LOST_HELD_S

    async def place(self, request_id: str, model: str) -> Place | None:
        """As GatewayQueue.place; of each other shard about as many go before."""
        ahead = await requests_ahead(self._pipeline, _shard(request_id, model), request_id)
        if ahead is None:
            return None
        if len(await self._all(model)) > 1:
            own, counts = keys.shard_of(request_id), await self._waiting(model)
            ahead += sum(min(ahead, n) for shard, n in enumerate(counts) if shard != own)
        return Place.behind(ahead, await self.drain_rate(model))

    async def journal(self, request_id: str, model: str) -> tuple[ChoiceState, ...] | None:
        return await read_journal(self._pipeline, _shard(request_id, model), request_id)

    async def send(self, engine_id: str, control: Control) -> None:
        key = keys.controls(engine_id)

        data = encode_control(control)
        await self._pipeline(
            ("XADD", key, "MAXLEN", "~", keys.CONTROLS_KEPT, "*", "c", data),
            ("PEXPIRE", key, keys.CONTROLS_TTL_MS),
        )

    async def cancel(self, request_id: str, model: str) -> None:
        shard = _shard(request_id, model)
        names = [
            shard.record(request_id),
            shard.payload(request_id),
            shard.journal(request_id),
            shard.stats,
            *shard.queues,
            shard.placed,
            *shard.fairness,
        ]
        arguments = [keys.ENDED_TTL_MS, request_id]
        _, owner = await self._connection.run("cancel", names, arguments, tries=TRIES)
        if owner:
            await self._tell(owner.decode(), Cancel(request_id=request_id))

    async def forget(self, request_ids: Sequence[str], model: str) -> None:
        records = [_shard(rid, model).record(rid) for rid in request_ids]
        await self._pipeline(*(("PEXPIRE", record, keys.FORGOTTEN_MS) for record in records))

    async def _tell(self, engine_id: str, control: Control) -> None:
        """Best effort: what the engine does not hear now, its next BEAT tells."""
        try:
            await self.send(engine_id, control)
        except BackendUnavailable as error:
            logger.warning("control message not written", extra={"error": str(error)})

    async def release(self, request_id: str, model: str, engine_id: str, attempt: int) -> None:
        shard = _shard(request_id, model)
        await self._connection.run(
            "giveback",
            [shard.record(request_id), shard.wakeups, *shard.queues],
            [request_id, engine_id, attempt, 0],
            tries=TRIES,
        )

    async def _all(self, model: str) -> list[ShardKeys]:
        """The model's shards in which there may be something."""
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
        """How many requests wait in each shard."""
        shards = await self._all(model)
        counts = await self._pipeline(*(("HGET", shard.stats, "w") for shard in shards))
        return [max(0, int(count or 0)) for count in counts]

    async def _waiting_of(self, request: GenerateRequest, own: int) -> int:
        """How many of the request's tenant wait, `own` of them in its shard."""
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
        shard = ShardKeys(model)
        (members,) = await self._pipeline(("SMEMBERS", shard.engines))
        if not members:
            return []
        ids = sorted(members)
        (values,) = await self._pipeline(("MGET", *(shard.status(i.decode()) for i in ids)))
        if lapsed := [engine for engine, value in zip(ids, values, strict=True) if value is None]:
            await self._pipeline(("SREM", shard.engines, *lapsed))
        return [decode_status(value) for value in values if value is not None]

    async def drain_rate(self, model: str) -> float:
        shards = await self._all(model)
        return sum(await asyncio.gather(*(rate_of(self._pipeline, shard) for shard in shards)))

    async def beat(self) -> None:
        await self._pipeline(
            ("SET", keys.gateway_beat(self.gateway_id), b"", "PX", self._lease_ms),
            ("PEXPIRE", keys.frames(self.gateway_id), keys.FRAMES_TTL_MS),
        )
        await self._connection.measure_clock(keys.gateway_beat(self.gateway_id))

    async def _pipeline(self, *commands: Command, raise_on_error: bool = True) -> list[Any]:
        """Commands that may be repeated, in one round trip. Raises BackendUnavailable."""
        return await self._connection.attempt(
            lambda: self._connection.client.pipeline(commands, raise_on_error=raise_on_error),
            tries=TRIES,
        )

    async def close(self) -> None:
        try:
            await self._connection.client.command("DEL", keys.gateway_beat(self.gateway_id))
        except RedisError as error:
            logger.warning("redis unavailable at close", extra={"error": str(error)})
        await self._connection.close()


def _placed(placement: Placement | None) -> list[str | float]:
    """What ADMIT takes of a placement."""
    if placement is None:
        return []
    shards = placement.shards
    arguments: list[str | float] = [placement.load_factor, placement.hold_ms]
    arguments.append(placement.capacity / shards)
    for choice in placement.choices:
        arguments += [choice.engine_id, choice.capacity / shards]
    return arguments


def _shard(request_id: str, model: str) -> ShardKeys:
    return ShardKeys(model, keys.shard_of(request_id))


def _outcome(request_id: str, why: bytes | None, outcome: bytes | None) -> Outcome:
    """The stored outcome, or what a script ended without one."""
    if outcome:
        return decode_outcome(outcome)
    code = FailureCode(why.decode()) if why else FailureCode.INTERNAL
    return Outcome(failed=failed(request_id, 0, code))
