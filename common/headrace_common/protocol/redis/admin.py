"""Shows and repairs queues over Redis Streams, for people who operate them.

Reads records and never prompts. It makes changes with the queue's scripts, and sends gateways the
same frames as engines do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any
from urllib.parse import unquote

from ...errors import FailureCode, MessageError
from ...sealing.sealer import PayloadKind, SealingError, opened, sealed
from ...wire import keys
from ...wire.keys import ShardKeys
from ...wire.messages import (
    Cancel,
    Frame,
    GenerateRequest,
    decode_request,
    encode_request,
    required_adapter,
    version_of,
)
from ..base import EngineStatus, QueueDepth
from ..failures import failed
from ..frames import encode_frame
from ..ledger import LedgerBounds
from ..live import EngineStart
from ..requests import fingerprint, priority_class, token_cost
from .client.client import Command
from .client.connection import Connection
from .gateway import RedisGatewayQueue
from .registry import RedisModelRegistry
from .starts import RedisStarts

TRIES = 3
EVERYTHING = 1_000_000
_RECORD = ("st", "o", "a", "f", "t", "d", "tk", "pk", "pn", "tn")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """One model's queue. `drain_rate`: requests per second that have lately left it."""

    model: str
    shards: int
    depth: QueueDepth
    drain_rate: float
    engines: Sequence[EngineStatus]
    starts: Sequence[EngineStart] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """A waiting or running request. `age` and `deadline_in` are in seconds.

    `priority` is the class of its stream: hi, n or lo.
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
    """A request that was set aside at `at` (Unix seconds). `replayable`: its payload exists."""

    letter_id: str
    request_id: str
    why: str
    failures: int
    at: float
    shard: int
    replayable: bool


class QueueAdmin:
    """Reads and changes all queues of one Redis.

    Raises BackendUnavailable, and BackendUnfit if the Redis user lacks a permission.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def models(self) -> dict[str, int]:
        """Every model with a queue, registered or with engines, and its number of shards."""
        found: dict[str, int] = {}
        scanned = await self._connection.attempt(
            lambda: self._connection.client.scan("[se]*:{*.*}*"), tries=TRIES
        )
        for key in scanned:
            model, shard = _model_of(key)
            found[model] = max(found.get(model, 1), shard + 1)
        registered = await self._pipeline(("HKEYS", keys.MODELS), ("HKEYS", keys.GRANTS))
        for name in chain(*registered):
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
            starts=tuple(await RedisStarts(self._connection, model).read()),
        )

    async def peek(
        self, model: str, shards: int = 1, *, limit: int, running: bool = False
    ) -> list[QueuedRequest]:
        """The next requests in each class's order, alternating between shards.

        With `running`, the requests that engines have.
        """
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
            (record,) = await self._pipeline(("HMGET", shard.record(rid), *_RECORD))
            if record[0] is not None:
                found.append(_queued(rid, priority, record, now))
        return found

    async def _waiting(self, shard: ShardKeys, priority: str, limit: int) -> list[str]:
        """Waiting requests: unread entries of the stream, then the lists of the next tenants."""
        ids = await self._entries(shard.queue(priority), limit, running=False)
        number = keys.PRIORITIES.index(priority) + 1
        (tenants,) = await self._pipeline(("ZRANGE", shard.waiting_tenants(number), 0, -1))
        for tenant in tenants:
            if len(ids) < limit:
                name = shard.tenant_list(number, tenant.decode())
                (blocked,) = await self._pipeline(("LRANGE", name, 0, limit - len(ids) - 1))
                ids += [rid.decode(errors="replace") for rid in blocked]
        return ids

    async def _entries(self, queue: str, limit: int, *, running: bool) -> list[str]:
        """Requests of the stream's entries that engines have read, or of the unread ones."""
        last = await self._delivered(queue)
        first, end = ("-", last) if running else (f"({last}", "+")
        (found,) = await self._pipeline(("XRANGE", queue, first, end, "COUNT", limit))
        return [fields.get(b"r", b"").decode(errors="replace") for _, fields in found]

    async def _delivered(self, queue: str) -> str:
        """The id of the last entry that the engines have read."""
        results = await self._connection.attempt(
            lambda: self._connection.client.pipeline(
                [("XINFO GROUPS", queue)], raise_on_error=False
            ),
            tries=TRIES,
        )
        if isinstance(results[0], Exception):
            return "0-0"  # without a stream or group, nothing was read
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
        """The number of gateways that began to load a registered model's files and did not
        finish."""
        entry = (await RedisModelRegistry(self._connection).models()).get(model)
        if entry is None:
            return 0
        (count,) = await self._pipeline(("ZCARD", keys.model_loads(entry.digest)))
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

        It runs without a gateway, as a background request does: the client of a stored request
        reads the answer as usual. False if it is not `replayable` or is already queued. Raises
        SealingError if its payload cannot be opened.
        """
        shard = ShardKeys(model, letter.shard)
        (payload,) = await self._pipeline(("GET", shard.payload(letter.request_id)))
        if payload is None:
            return False
        binding, sealer = (model, letter.request_id), self._connection.sealer
        try:
            await self._connection.measure_clock(shard.stats)
            now = self._connection.clock.now_ms()
            plain = await opened(sealer, PayloadKind.PAYLOAD, binding, payload)
            request = _renewed(decode_request(plain), now, seconds)
        except SealingError:
            raise
        except MessageError:
            return False
        rid = letter.request_id
        names = [shard.record(rid), shard.payload(rid), shard.journal(rid)]
        arguments = [
            rid,
            letter.letter_id,
            keys.new_incarnation("replay"),
            sealer.digests(fingerprint(request))[0],
            int(seconds * 1000),
            token_cost(request),
            len(request.prompt_token_ids),
            priority_class(request.priority),
            version_of(request),
            keys.GRACE_MS,
            await sealed(sealer, PayloadKind.PAYLOAD, binding, encode_request(request)),
            request.keep_ms,
            request.tenant,
            f"{request.tenant_weight:g}",
            request.key,
            request.lora or "",
            LedgerBounds().field,
            required_adapter(request),
        ]
        names += [shard.stats, shard.dead_letters, *shard.queues, *shard.fairness]
        return bool(await self._connection.run("replay", names, arguments, tries=TRIES))

    async def purge_dead(self, model: str, letters: Sequence[DeadLetter]) -> int:
        """Deletes dead letters and their payloads; returns their number."""
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
        """Cancels all waiting requests and tells their clients; returns their number."""
        purged = 0
        for number in range(shards):
            shard = ShardKeys(model, number)
            for priority in keys.PRIORITIES:
                for rid in await self._waiting(shard, priority, EVERYTHING):
                    purged += await self._cancel(model, shard, rid)
        return purged

    async def _cancel(self, model: str, shard: ShardKeys, rid: str) -> int:
        ((state, gateway, attempt),) = await self._pipeline(
            ("HMGET", shard.record(rid), "st", "g", "a")
        )
        if state != b"queued":
            return 0
        names = [shard.record(rid), shard.payload(rid), shard.journal(rid)]
        now_state, owner = await self._connection.run(
            "cancel",
            [*names, shard.stats, *shard.queues, shard.ledger, shard.placed, *shard.fairness],
            [keys.ENDED_TTL_MS, rid, ""],
            tries=TRIES,
        )
        if now_state != b"cancelled":
            return 0
        if owner:  # an engine took it meanwhile
            queue = RedisGatewayQueue(self._connection, "")
            await queue.send(owner.decode(), model, Cancel(request_id=rid))
        await self._tell(gateway.decode(), model, rid, int(attempt))
        return 1

    async def _tell(self, gateway_id: str, model: str, rid: str, attempt: int) -> None:
        """Sends a reply as an engine would, so that the client need not wait for its gateway."""
        frame = Frame("operator", (failed(rid, attempt, FailureCode.CANCELLED),))
        key = keys.frames_between(gateway_id, frame.engine_id, model)
        data = self._connection.sealer.seal(PayloadKind.FRAME, (gateway_id,), encode_frame(frame))
        await self._pipeline(("XADD", key, "*", "f", data), ("PEXPIRE", key, keys.FRAMES_TTL_MS))

    async def _pipeline(self, *commands: Command) -> list[Any]:
        return await self._connection.attempt(
            lambda: self._connection.client.pipeline(commands), tries=TRIES
        )


def _model_of(key: bytes) -> tuple[str, int]:
    """The model and shard that a key's hash tag names."""
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


def _queued(rid: str, priority: str, record: list[Any], now: int) -> QueuedRequest:
    state, owner, attempt, failures, admitted, deadline, tokens, prompt, made, tenant = record
    return QueuedRequest(
        request_id=rid,
        state=state.decode(),
        priority=priority,
        age=max(0.0, now - int(admitted or 1000 * now) / 1000),
        deadline_in=int(deadline) / 1000 - now,
        tenant=(tenant or b"").decode(errors="replace"),
        prompt_tokens=int(prompt),
        most_tokens=int(tokens),
        output_tokens=int(made),
        owner=owner.decode(),
        attempt=int(attempt),
        failures=int(failures),
    )
