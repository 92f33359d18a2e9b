"""The queues as their operators see and repair them, over Redis Streams.

Reads records and never prompts. What it changes goes through the same scripts as everything else;
gateways hear of it as they hear from an engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any
from urllib.parse import unquote

from .. import keys
from ..errors import FailureCode, MessageError
from ..frames import encode_frame
from ..keys import ShardKeys
from ..messages import (
    PROTOCOL_VERSION,
    Cancel,
    Frame,
    GenerateRequest,
    decode_request,
    encode_request,
)
from .base import EngineStatus, QueueDepth
from .client import Command
from .connection import Connection
from .failures import failed
from .model_entry import decode_entry
from .redis_gateway import RedisGatewayQueue
from .requests import fingerprint, priority_class, token_cost

TRIES = 3
EVERYTHING = 1_000_000
_RECORD = ("st", "o", "a", "f", "t", "d", "tk", "pk", "pn")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """One model's queue. `drain_rate`: requests a second that have lately left it."""

    model: str
    shards: int
    depth: QueueDepth
    drain_rate: float
    engines: Sequence[EngineStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """A request that waits or runs. `age` and `deadline_in` in seconds; `tenant` "" where its
    payload cannot be read. `priority` is the class of its stream: hi, n or lo.
    """

    request_id: str
    state: str
    priority: str
    age: float
    deadline_in: float
    tenant: str
    prompt_tokens: int
    most_tokens: int
    output_tokens: int
    owner: str
    attempt: int
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A request that was set aside. `at` in Unix seconds; `replayable`: its payload is there."""

    letter_id: str
    request_id: str
    why: str
    failures: int
    at: float
    shard: int
    replayable: bool


class QueueAdmin:
    """Raises BackendUnavailable, and BackendUnfit where the user may not do it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def models(self) -> dict[str, int]:
        """Every model with a queue, registered or with engines, and how many shards it has."""
        found: dict[str, int] = {}
        scanned = await self._connection.attempt(
            lambda: self._connection.client.scan("[se]*:{*.*}*"), tries=TRIES
        )
        for key in scanned:
            model, shard = _model_of(key)
            found[model] = max(found.get(model, 1), shard + 1)
        (registered,) = await self._pipeline(("HGETALL", keys.MODELS))
        for name in registered:
            if name != keys.MODELS_STORE:
                found.setdefault(name.decode(), 1)
        return dict(sorted(found.items()))

    async def status(self, model: str, shards: int = 1) -> QueueStatus:
        queue = RedisGatewayQueue(self._connection, "", shards=shards)
        return QueueStatus(
            model=model,
            shards=shards,
            depth=await queue.depth(model),
            drain_rate=await queue.drain_rate(model),
            engines=tuple(await queue.engines(model)),
        )

    async def peek(
        self, model: str, shards: int = 1, *, limit: int, running: bool = False
    ) -> list[QueuedRequest]:
        """The next requests in each class's order, of each shard one in turn; with `running` those
        that engines have."""
        found: list[QueuedRequest] = []
        for priority in keys.PRIORITIES:
            left = limit - len(found)
            if left > 0:
                parts = [
                    await self._peek(ShardKeys(model, number), priority, left, running=running)
                    for number in range(shards)
                ]
                found += [one for turn in zip_longest(*parts) for one in turn if one is not None]
        return found[:limit]

    async def _peek(
        self, shard: ShardKeys, priority: str, limit: int, *, running: bool
    ) -> list[QueuedRequest]:
        if running:
            ids = await self._entries(shard.queue(priority), limit, running=True)
        else:
            ids = await self._waiting(shard, priority, limit)
        ((now, _),) = await self._pipeline(("TIME",))
        found = []
        for rid in ids:
            record, payload = await self._pipeline(
                ("HMGET", shard.record(rid), *_RECORD), ("GET", shard.payload(rid))
            )
            if record[0] is not None:
                found.append(_queued(rid, priority, record, payload, now))
        return found

    async def _waiting(self, shard: ShardKeys, priority: str, limit: int) -> list[str]:
        """What waits: the unread entries of the stream, then the lists of those who are next."""
        ids = await self._entries(shard.queue(priority), limit, running=False)
        number = keys.PRIORITIES.index(priority) + 1
        (tenants,) = await self._pipeline(("ZRANGE", shard.waiting_tenants(number), 0, -1))
        for tenant in tenants:
            if len(ids) < limit:
                name = shard.tenant_list(number, tenant.decode())
                (parked,) = await self._pipeline(("LRANGE", name, 0, limit - len(ids) - 1))
                ids += [rid.decode(errors="replace") for rid in parked]
        return ids

    async def _entries(self, queue: str, limit: int, *, running: bool) -> list[str]:
        """Requests of the stream's entries that engines were given, or of the others."""
        last = await self._delivered(queue)
        first, end = ("-", last) if running else (f"({last}", "+")
        (found,) = await self._pipeline(("XRANGE", queue, first, end, "COUNT", limit))
        return [fields.get(b"r", b"").decode(errors="replace") for _, fields in found]

    async def _delivered(self, queue: str) -> str:
        """The id of the last entry that the engines were given."""
        results = await self._connection.attempt(
            lambda: self._connection.client.pipeline(
                [("XINFO GROUPS", queue)], raise_on_error=False
            ),
            tries=TRIES,
        )
        if isinstance(results[0], Exception):
            return "0-0"  # no stream or no group yet: nothing was given
        for group in results[0]:
            if group["name"] == keys.GROUP.encode():
                return str(group["last-delivered-id"].decode())
        return "0-0"

    async def dead(self, model: str, shards: int = 1, *, limit: int) -> list[DeadLetter]:
        """The newest dead letters, the newest first."""
        found: list[DeadLetter] = []
        for number in range(shards):
            shard = ShardKeys(model, number)
            (entries,) = await self._pipeline(
                ("XREVRANGE", shard.dead_letters, "+", "-", "COUNT", limit)
            )
            found += [await self._letter(shard, number, *entry) for entry in entries]
        return sorted(found, key=lambda letter: -letter.at)[:limit]

    async def died_loading(self, model: str) -> int:
        """How many gateways began to load the registered model's files and have not ended."""
        (data,) = await self._pipeline(("HGET", keys.MODELS, model))
        if data is None:
            return 0
        (count,) = await self._pipeline(("ZCARD", keys.model_loads(decode_entry(data).digest)))
        return int(count)

    async def _letter(
        self, shard: ShardKeys, number: int, name: bytes, fields: dict[bytes, bytes]
    ) -> DeadLetter:
        rid = fields.get(b"r", b"").decode(errors="replace")
        (there,) = await self._pipeline(("EXISTS", shard.payload(rid)))
        return DeadLetter(
            letter_id=name.decode(),
            request_id=rid,
            why=fields.get(b"why", b"").decode(errors="replace"),
            failures=int(fields.get(b"n", b"0")),
            at=_unix(name),
            shard=number,
            replayable=bool(there),
        )

    async def replay(self, model: str, letter: DeadLetter, *, seconds: float) -> bool:
        """Queues a dead letter's request again; it may take `seconds`.

        It runs without a gateway, as one in the background: a client of a kept request reads the
        answer as usual. False where it cannot be: see `replayable`, or it is queued already.
        """
        shard = ShardKeys(model, letter.shard)
        (payload,) = await self._pipeline(("GET", shard.payload(letter.request_id)))
        if payload is None:
            return False
        try:
            await self._connection.measure_clock(shard.stats)
            now = self._connection.clock.now_ms()
            request = _renewed(decode_request(payload), now, seconds)
        except MessageError:
            return False
        rid = letter.request_id
        names = [shard.record(rid), shard.payload(rid), shard.journal(rid)]
        arguments = [
            rid,
            letter.letter_id,
            keys.new_incarnation("replay"),
            fingerprint(request),
            int(seconds * 1000),
            token_cost(request),
            len(request.prompt_token_ids),
            priority_class(request.priority),
            PROTOCOL_VERSION,
            keys.GRACE_MS,
            encode_request(request),
            request.keep_ms,
            request.tenant,
        ]
        names += [shard.stats, shard.dead_letters, *shard.queues, *shard.fairness]
        return bool(await self._connection.run("replay", names, arguments, tries=TRIES))

    async def purge_dead(self, model: str, letters: Sequence[DeadLetter]) -> int:
        """Forgets dead letters and the payloads that were kept with them; how many there were."""
        purged = 0
        for letter in letters:
            shard = ShardKeys(model, letter.shard)
            (state,) = await self._pipeline(("HGET", shard.record(letter.request_id), "st"))
            commands: list[Command] = [("XDEL", shard.dead_letters, letter.letter_id)]
            if state not in (b"queued", b"running"):
                commands.append(("DEL", shard.payload(letter.request_id)))
            purged += (await self._pipeline(*commands))[0]
        return purged

    async def purge_waiting(self, model: str, shards: int = 1) -> int:
        """Cancels what waits now; each client is told. How many requests there were."""
        purged = 0
        for number in range(shards):
            shard = ShardKeys(model, number)
            for priority in keys.PRIORITIES:
                for rid in await self._waiting(shard, priority, EVERYTHING):
                    purged += await self._cancel(shard, rid)
        return purged

    async def _cancel(self, shard: ShardKeys, rid: str) -> int:
        ((state, gateway, attempt),) = await self._pipeline(
            ("HMGET", shard.record(rid), "st", "g", "a")
        )
        if state != b"queued":
            return 0
        names = [shard.record(rid), shard.payload(rid), shard.journal(rid)]
        now_state, owner = await self._connection.run(
            "cancel",
            [*names, shard.stats, *shard.queues, shard.placed, *shard.fairness],
            [keys.ENDED_TTL_MS, rid],
            tries=TRIES,
        )
        if now_state != b"cancelled":
            return 0
        if owner:  # an engine took it meanwhile
            queue = RedisGatewayQueue(self._connection, "")
            await queue.send(owner.decode(), Cancel(request_id=rid))
        await self._tell(gateway.decode(), rid, int(attempt))
        return 1

    async def _tell(self, gateway_id: str, rid: str, attempt: int) -> None:
        """As an engine would, so that the client need not wait for its gateway to ask."""
        frame = Frame("operator", (failed(rid, attempt, FailureCode.CANCELLED),))
        key = keys.frames(gateway_id)
        await self._pipeline(
            ("XADD", key, "*", "f", encode_frame(frame)), ("PEXPIRE", key, keys.FRAMES_TTL_MS)
        )

    async def _pipeline(self, *commands: Command) -> list[Any]:
        return await self._connection.attempt(
            lambda: self._connection.client.pipeline(commands), tries=TRIES
        )


def _model_of(key: bytes) -> tuple[str, int]:
    """Model and shard that a key's hash tag names."""
    tag = key.decode(errors="replace").partition("{")[2].partition("}")[0]
    model, _, shard = tag.partition(":")[0].rpartition(".")
    return unquote(model), int(shard) if shard.isdigit() else 0


def _unix(entry_id: bytes) -> float:
    return int(entry_id.split(b"-")[0]) / 1000


def _renewed(request: GenerateRequest, now: int, seconds: float) -> GenerateRequest:
    window = int(seconds * 1000)
    return replace(
        request,
        created_ms=now,
        deadline_ms=now + window,
        window_ms=max(window, request.window_ms),
        keep_ms=max(keys.ENDED_TTL_MS, request.keep_ms),
    )


def _queued(
    rid: str, priority: str, record: list[Any], payload: bytes | None, now: int
) -> QueuedRequest:
    state, owner, attempt, failures, admitted, deadline, tokens, prompt, made = record
    return QueuedRequest(
        request_id=rid,
        state=state.decode(),
        priority=priority,
        age=max(0.0, now - int(admitted or 1000 * now) / 1000),
        deadline_in=int(deadline) / 1000 - now,
        tenant=_tenant(payload),
        prompt_tokens=int(prompt),
        most_tokens=int(tokens),
        output_tokens=int(made),
        owner=owner.decode(),
        attempt=int(attempt),
        failures=int(failures),
    )


def _tenant(payload: bytes | None) -> str:
    try:
        return "" if payload is None else decode_request(payload).tenant
    except MessageError:
        return ""
