"""The engine's side of the queue over Redis Streams, for one shard of one model.

Who owns what is decided in the scripts. TAKE and REAP are never repeated: a lease whose reply was
lost lapses, and is handed out again.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from redis.exceptions import RedisError, ResponseError

from .. import keys
from ..errors import BackendUnavailable, FailureCode, MessageError
from ..frames import (
    decode_control,
    encode_ending,
    encode_frame,
    encode_logprobs,
    encode_outcome,
)
from ..keys import ShardKeys
from ..messages import (
    PROTOCOL_VERSION,
    ChoiceState,
    Control,
    Frame,
    Reply,
    decode_request,
    pack_tokens,
)
from .base import Beat, EngineStatus, Lease, Outcome, Progress, Verdict
from .client import Client, Command, backoff
from .connection import Connection, check_backend, entries, translate
from .failures import ended_state, failed
from .framing import frames_of
from .leases import LeaseMemory
from .redis_journal import entry_id, read_journal
from .requests import check_shard
from .shards import SHARD_FIELDS, shard_note, shards_kept
from .status import encode_status

logger = logging.getLogger(__name__)

TRIES = 2
MOST_BEATS = 32  # in one script, which holds up all else
RENEW_FRAMES = 20.0  # seconds between renewals of a frame stream's life
SWEEP_EVERY = 20  # reaps between sweeps of consumers that are gone


class RedisEngineQueue:
    """One incarnation of an engine, with one shard of its model; see ShardQueue. `lease_ms`: how
    long it may be silent."""

    def __init__(
        self,
        connection: Connection,
        engine_id: str,
        model: str,
        *,
        shard: int = keys.DEFAULT_SHARD,
        lease_ms: int = keys.LEASE_MS,
    ) -> None:
        self.engine_id = engine_id
        self.shard = shard
        self._connection = connection
        self._keys = ShardKeys(model, shard)
        self._lease_ms = lease_ms
        self._reaps = 0
        self._waiter: Client | None = None
        self._reading: asyncio.Task[None] | None = None
        self._woken = "0-0"
        self._left: tuple[int, str] | None = None
        self._free_at = math.inf  # when what was left to another engine is anybody's
        self._memory = LeaseMemory()
        self._trim = 0  # server time of the newest frame written, ms
        self._renewed: dict[str, float] = {}

    async def start(self) -> None:
        """Checks the servers, once for all shards. Raises BackendUnfit, BackendUnavailable."""
        if self.shard == keys.DEFAULT_SHARD:
            await check_backend(self._connection)
            await self._connection.measure_clock(self._keys.status(self.engine_id))
        (last,) = await self._pipeline(("XREVRANGE", self._keys.wakeups, "+", "-", "COUNT", 1))
        if last:
            self._woken = last[0][0].decode()

    # Leases

    async def take(self, count: int, prompt_tokens: int | None = None) -> Sequence[Lease]:
        shard = self._keys
        prefixes = [shard.records, shard.payloads, shard.journals]
        room = -1 if prompt_tokens is None else prompt_tokens
        self._left, self._free_at = None, math.inf  # nobody knows where this fails
        found, endings, left = await self._connection.run(
            "take",
            [shard.stats, shard.dead_letters, shard.wakeups, *shard.queues, *prefixes]
            + [shard.placed, *shard.fairness],
            [self.engine_id, count, room, PROTOCOL_VERSION, keys.ENDED_TTL_MS],
        )
        self._left = (int(left[0]) - 1, left[1].decode()) if left else None
        held = bool(left) and left[2] >= 0
        self._free_at = time.monotonic() + left[2] / 1000 if held else math.inf
        return await self._leases(found, endings)

    async def reap(self, count: int, *, suspects: bool = True) -> Sequence[Lease]:
        shard = self._keys
        prefixes = [shard.records, shard.payloads, shard.journals]
        sweep = self._reaps % SWEEP_EVERY == 0
        self._reaps += 1
        found, endings = await self._connection.run(
            "reap",
            [shard.stats, shard.dead_letters, *shard.queues, *prefixes],
            [
                self.engine_id,
                count,
                self._lease_ms,
                PROTOCOL_VERSION,
                int(suspects),
                int(sweep),
                keys.ENDED_TTL_MS,
            ],
        )
        return await self._leases(found, endings)

    async def _leases(self, found: list[Any], endings: list[Any]) -> list[Lease]:
        replies: dict[str, list[Reply]] = {}
        leases = []
        for item in found:
            rid, gateway = item[0].decode(), item[2].decode()
            try:
                check_shard(rid, self.shard)
                leases.append(self._memory.check(_lease(item)))
            except MessageError as error:
                logger.warning("request refused", extra={"request_id": rid, "error": str(error)})
                malformed = failed(rid, int(item[1]), FailureCode.MALFORMED)
                await self._end(rid, int(item[1]), Outcome(failed=malformed), "malformed")
                replies.setdefault(gateway, []).append(malformed)
        for rid, attempt, gateway, why in endings:
            message = failed(rid.decode(), int(attempt), FailureCode(why.decode()))
            replies.setdefault(gateway.decode(), []).append(message)
        if replies:
            await self._tell(replies)
        return leases

    async def _tell(self, replies: Mapping[str, Sequence[Reply]]) -> None:
        """Best effort: a gateway that hears nothing asks, and finds the stored outcome."""
        try:
            await self.publish(replies)
        except BackendUnavailable as error:
            logger.warning("redis unavailable, gateway not told", extra={"error": str(error)})

    async def wait(self) -> None:
        """As EngineQueue.wait. Cancelling it is cheap: the read under way stays for the next call,
        which it can only wake too early, since its cursors are older."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_until_new())
        held = self._free_at - time.monotonic()
        await asyncio.wait({self._reading}, timeout=None if held == math.inf else max(0.0, held))
        if self._reading.done():
            done, self._reading = self._reading, None
            done.result()

    async def _read_until_new(self) -> None:
        attempt = 0
        while True:
            try:
                return await self._read_new()
            except RedisError as error:
                if translate(error) is None:
                    raise
                await self._drop_waiter()
            await backoff(attempt)
            attempt = min(attempt + 1, 10)

    async def _read_new(self) -> None:
        """Blocks until a queue has an entry behind the last one delivered, or a wake-up came."""
        if self._waiter is None:
            self._waiter = self._connection.reader()
        block = int(self._connection.config.block * 1000)
        streams = {**await self._delivered(), self._keys.wakeups: self._woken}
        reply = await self._waiter.command(
            "XREAD", "COUNT", 1, "BLOCK", block, "STREAMS", *streams, *streams.values()
        )
        for name, batch in reply or ():
            if name.decode() == self._keys.wakeups:
                self._woken = batch[-1][0].decode()

    async def _delivered(self) -> dict[str, str]:
        found: dict[str, str] = {}
        results = await self._connection.client.pipeline(
            [("XINFO GROUPS", queue) for queue in self._keys.queues], raise_on_error=False
        )
        for number, (queue, groups) in enumerate(zip(self._keys.queues, results, strict=True)):
            found[queue] = _last_delivered(groups)
            if self._left is not None and self._left[0] == number:
                found[queue] = max(found[queue], self._left[1], key=entry_id)
            elif self._left is not None and self._left[0] < number:
                found[queue] = "$"  # nothing of it is taken before what was left
        return found

    async def _drop_waiter(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            await waiter.close()

    @property
    def holds_more(self) -> bool:
        return self._left is not None

    @property
    def lacks_room(self) -> bool:
        return self._left is not None and self._free_at == math.inf

    async def beat(self, progress: Sequence[Progress], status: EngineStatus) -> Mapping[str, Beat]:
        await self._publish_status(status)
        return await self.renew(progress)

    async def renew(self, progress: Sequence[Progress]) -> Mapping[str, Beat]:
        parts = [progress[at : at + MOST_BEATS] for at in range(0, len(progress), MOST_BEATS)]
        results = await self._run_many("beat", [self._beat_call(part) for part in parts])
        return {
            item.request_id: _beat(item, result)
            for item, result in zip(progress, itertools.chain(*results), strict=True)
        }

    def _beat_call(self, progress: Sequence[Progress]) -> tuple[list[str], list[Any]]:
        names = [*self._keys.queues]
        args: list[Any] = [self.engine_id, keys.GRACE_MS]
        for item in progress:
            names += [self._keys.record(item.request_id), self._keys.journal(item.request_id)]
            args += [item.attempt, int(item.executing), len(item.choices)]
            for index, choice in zip(item.journaled, item.choices, strict=True):
                args += [index, *_journaled(choice)]
        return [*names, *self._keys.fairness], args

    async def _publish_status(self, status: EngineStatus) -> None:
        name = self._keys.status(self.engine_id)
        await self._pipeline(
            ("SET", name, encode_status(status), "PX", self._lease_ms),
            ("SADD", self._keys.engines, self.engine_id),
        )
        await self._connection.measure_clock(name)

    async def tell_shards(self, shards: int) -> int:
        now, name = self._connection.clock.now_ms(), self._keys.stats
        (fields,) = await self._pipeline(("HMGET", name, *SHARD_FIELDS))
        kept = shards_kept(fields, now)
        if note := shard_note(shards, kept, now):
            await self._pipeline(("HSET", name, *note))
        return max(shards, kept)

    async def _pipeline(self, *commands: Command) -> list[Any]:
        """Commands that may be repeated, in one round trip. Raises BackendUnavailable."""
        return await self._connection.attempt(
            lambda: self._connection.client.pipeline(commands), tries=TRIES
        )

    async def give_back(self, request_ids: Sequence[str]) -> None:
        shard = self._keys
        await self._run_many(
            "giveback",
            [
                ([shard.record(rid), shard.wakeups, *shard.queues], [rid, self.engine_id, "", 1])
                for rid in request_ids
            ],
        )

    async def _run_many(self, name: str, calls: list[tuple[list[str], list[Any]]]) -> list[Any]:
        if not calls:
            return []

        async def run() -> list[Any]:
            return await (await self._connection.scripts()).run_many(name, calls)

        return await self._connection.attempt(run, tries=TRIES)

    # Output

    async def journal(self, request_id: str) -> tuple[ChoiceState, ...] | None:
        return await read_journal(self._pipeline, self._keys, request_id)

    async def resume(self, request_id: str, attempt: int, choices: Sequence[ChoiceState]) -> bool:
        args: list[Any] = [self.engine_id, attempt, keys.GRACE_MS]
        for choice in choices:
            args += _journaled(choice)
        names = [self._keys.record(request_id), self._keys.journal(request_id)]
        return bool(await self._connection.run("resume", names, args, tries=TRIES))

    async def publish(self, replies: Mapping[str, Sequence[Reply]]) -> None:
        commands: list[Command] = []
        now = time.monotonic()
        for gateway_id, items in replies.items():
            for part in frames_of(items):
                frame = encode_frame(Frame(self.engine_id, tuple(part)))
                commands += self._frame_commands(keys.frames(gateway_id), frame, now)
        if commands:
            await self._connection.attempt(lambda: self._write(commands), tries=TRIES)

    def _frame_commands(self, key: str, frame: bytes, now: float) -> list[Command]:
        """The write of one frame; now and then what keeps the stream from living for ever."""
        oldest = max(0, self._trim - keys.FRAMES_KEPT_MS)
        write = ("XADD", key, "MINID", "~", oldest, "*", "f", frame)
        if now - self._renewed.get(key, -RENEW_FRAMES) < RENEW_FRAMES:
            return [write]
        self._renewed = {k: at for k, at in self._renewed.items() if now - at < RENEW_FRAMES}
        self._renewed[key] = now
        return [write, ("PEXPIRE", key, keys.FRAMES_TTL_MS)]

    async def _write(self, commands: list[Command]) -> None:
        written = await self._connection.client.pipeline(commands)
        self._trim = entry_id(written[0].decode())[0]

    async def controls(self) -> AsyncIterator[Control]:
        """As EngineQueue.controls. Each message once, unless Redis was rolled back; a lost one has
        its backstop: BEAT for a cancel or another gateway, a new Takeover for a Resume."""
        key = keys.controls(self.engine_id)

        async def first(client: Client, cursor: str) -> str:
            newest = await client.command("XREVRANGE", key, "+", "-", "COUNT", 1)
            if not cursor or not newest:
                return "0-0"
            last: str = newest[0][0].decode()
            return min(cursor, last, key=entry_id)

        async for _, fields in entries(self._connection, key, first):
            try:
                yield decode_control(fields.get(b"c", b""))
            except MessageError as error:
                logger.warning("control message refused", extra={"error": str(error)})

    async def gateway_alive(self, gateway_id: str) -> bool:
        (found,) = await self._pipeline(("EXISTS", keys.gateway_beat(gateway_id)))
        return bool(found)

    async def finish(self, request_id: str, attempt: int, outcome: Outcome) -> bool:
        return await self._end(request_id, attempt, outcome, "")

    async def _end(self, rid: str, attempt: int, outcome: Outcome, letter: str) -> bool:
        shard = self._keys
        names = [shard.record(rid), shard.payload(rid), shard.journal(rid)]
        args = [
            rid,
            self.engine_id,
            attempt,
            ended_state(outcome),
            outcome.failed.failure.value if outcome.failed else "",
            encode_outcome(outcome),
            keys.ENDED_TTL_MS,
            letter,
            sum(len(choice.token_ids) for choice in outcome.choices),
        ]
        return bool(
            await self._connection.run(
                "finish",
                [*names, shard.stats, shard.dead_letters, *shard.queues, *shard.fairness],
                args,
                tries=TRIES,
            )
        )

    async def close(self) -> None:
        """Leaves the list of engines; closes the connections."""
        try:
            await self._connection.client.pipeline(
                [
                    ("DEL", self._keys.status(self.engine_id)),
                    ("SREM", self._keys.engines, self.engine_id),
                ]
            )
        except RedisError as error:
            logger.warning("redis unavailable at close", extra={"error": str(error)})
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        await self._drop_waiter()
        await self._connection.close()


def _journaled(choice: ChoiceState) -> list[bytes]:
    """A choice's output as BEAT and RESUME write it to the journal."""
    return [
        pack_tokens(choice.token_ids),
        encode_ending(choice),
        encode_logprobs(choice.logprobs),
    ]


def _lease(item: list[Any]) -> Lease:
    """Raises MessageError."""
    _, attempt, gateway, recovered, suspect, payload, placed, waited, left = item
    request = decode_request(payload)
    if request.request_id != item[0].decode():
        raise MessageError("the request's id is not the one it was queued under")
    return Lease(
        request=request,
        attempt=int(attempt),
        gateway_id=gateway.decode(),
        recovered=bool(recovered),
        suspect=bool(suspect),
        placed=placed == 1 if placed else None,
        waited=waited / 1000,
        left=left / 1000,
    )


def _beat(item: Progress, result: list[Any]) -> Beat:
    verdict = Verdict(result[0].decode())
    gateway = result[1].decode() if len(result) > 1 else ""
    counts = tuple(int(count) for count in result[2:])
    return Beat(verdict=verdict, gateway_id=gateway, journaled=counts or item.journaled)


def _last_delivered(groups: Any) -> str:
    """Where the group has read to; the beginning where the stream or the group is not there yet."""
    if isinstance(groups, ResponseError):
        return "0-0"
    if isinstance(groups, Exception):
        raise groups
    for group in groups:
        if group["name"] == keys.GROUP.encode():
            last: bytes = group["last-delivered-id"]
            return last.decode()
    return "0-0"
