"""The engine's side of the queue over Redis Streams, for one shard of one model.

The scripts decide which engine owns a request. TAKE and REAP are never repeated: a lease whose
reply was lost expires, and the request is handed out again.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from ...errors import BackendUnavailable, FailureCode, MessageError
from ...sealing.sealer import Binding, PayloadKind, SealingError, opened, sealed
from ...wire import keys
from ...wire.keys import ShardKeys
from ...wire.messages import (
    REQUEST_VERSION,
    ChoiceState,
    Control,
    Failed,
    Frame,
    GenerateRequest,
    Reply,
    decode_request,
    pack_tokens,
)
from ..attempt_history import AttemptHistory
from ..base import (
    Beat,
    EngineStatus,
    Lease,
    Outcome,
    Progress,
    TakeBounds,
    TenantUse,
    Verdict,
)
from ..failures import ended_state, failed
from ..frames import (
    decode_control,
    encode_ending,
    encode_frame,
    encode_logprobs,
    encode_outcome,
    is_of_operator,
)
from ..ledger import AttemptUsage
from ..requests import check_shard
from ..shards import SHARD_FIELDS, shard_note, shards_kept
from ..status import encode_status
from ..variants import EngineSide
from .client.client import Command, RedisClient, backoff
from .client.connection import Connection, check_backend, translate
from .framing import frames_of
from .images import read_image
from .journal import JournalReader, entry_id
from .sealing_check import SealingCheck
from .statuses import read_statuses
from .stream_reader import entries
from .variants import SideBeats

logger = logging.getLogger(__name__)

TRIES = 2
MOST_BEATS = 32  # progress entries in one script, which blocks the server while it runs
RENEW_FRAMES = 20.0  # seconds between two renewals of the expiry of a stream of frames
SWEEP_EVERY = 20  # reaps between two removals of consumers whose engines are gone


class RedisEngineQueue:
    """A ShardQueue over Redis. `lease_ms` is how long the engine may be silent.

    `side` is one object for all shards; None: a stable engine of a model that never has a canary.
    """

    def __init__(
        self,
        connection: Connection,
        engine_id: str,
        model: str,
        *,
        shard: int = keys.DEFAULT_SHARD,
        lease_ms: int = keys.LEASE_MS,
        side: EngineSide | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.shard = shard
        self._connection = connection
        self._model = model
        self._keys = ShardKeys(model, shard)
        self._lease_ms = lease_ms
        self._reaps = 0
        self._waiter: RedisClient | None = None
        self._reading: asyncio.Task[None] | None = None
        self._woken = "0-0"
        # The entry at which TAKE stopped: the number of its queue, and its id.
        self._left: tuple[int, str] | None = None
        # When any engine may take that entry; inf if it is not left to another engine.
        self._free_at = math.inf
        self._attempts = AttemptHistory()
        self._newest_frame_ms = 0  # the server's time
        self._renewed: dict[str, float] = {}
        self._sealer = connection.sealer
        self._adapters: tuple[str, ...] = ()
        self._bounds = TakeBounds()
        self._side = side or EngineSide(alone=True)
        self._side_beats = SideBeats(self._side, self._keys.canary, lease_ms)
        # Whether this connection's user may read the shared stream of control messages.
        self._reads_shared: tuple[RedisClient, bool] | None = None

    async def start(self) -> None:
        """Checks the servers once for all shards. Raises BackendUnfit, BackendUnavailable."""
        if self.shard == keys.DEFAULT_SHARD:
            await check_backend(self._connection, self._model)
            await SealingCheck(self._connection).start()
            await self._connection.measure_clock(self._keys.status(self.engine_id))
        (last,) = await self._pipeline(("XREVRANGE", self._keys.wakeups, "+", "-", "COUNT", 1))
        if last:
            self._woken = last[0][0].decode()

    # Leases

    def serve_adapters(self, adapters: Collection[str]) -> None:
        self._adapters = tuple(adapters)

    def limit(self, bounds: TakeBounds) -> None:
        self._bounds = bounds

    async def engines(self) -> Sequence[EngineStatus]:
        return await read_statuses(self._pipeline, self._model)

    async def take(
        self, count: int, prompt_tokens: int | None = None, low_priority: int | None = None
    ) -> Sequence[Lease]:
        shard = self._keys
        prefixes = [shard.records, shard.payloads, shard.journals]
        room = -1 if prompt_tokens is None else prompt_tokens
        self._left, self._free_at = None, math.inf  # unknown if this fails
        found, endings, left = await self._connection.run(
            "take",
            [shard.stats, shard.dead_letters, shard.wakeups, *shard.queues, *prefixes]
            + [shard.ledger, shard.placed, *shard.fairness],
            [
                self.engine_id,
                count,
                room,
                REQUEST_VERSION,
                keys.ENDED_TTL_MS,
                self._bounds.fewest,
                -1 if self._bounds.most is None else self._bounds.most,
                int(self._bounds.hold * 1000),
                -1 if low_priority is None else max(0, low_priority),
                *self._side_args(),
                *self._adapters,
            ],
        )
        self._left = (int(left[0]) - 1, left[1].decode()) if left else None
        is_held = bool(left) and left[2] >= 0
        self._free_at = time.monotonic() + left[2] / 1000 if is_held else math.inf
        return await self._leases(found, endings)

    async def image(self, request: GenerateRequest, digest: bytes) -> bytes | None:
        return await read_image(self._connection, request, digest)

    async def reap(self, count: int, *, suspects: bool = True) -> Sequence[Lease]:
        shard = self._keys
        prefixes = [shard.records, shard.payloads, shard.journals]
        sweep = self._reaps % SWEEP_EVERY == 0
        self._reaps += 1
        found, endings = await self._connection.run(
            "reap",
            [shard.stats, shard.dead_letters, *shard.queues, *prefixes, shard.ledger],
            [
                self.engine_id,
                count,
                self._lease_ms,
                REQUEST_VERSION,
                int(suspects),
                int(sweep),
                keys.ENDED_TTL_MS,
                0 if self._bounds.handed_over else int(self._bounds.hold * 1000),
                *self._side_args(),
                int(self._side.canary_wanted),
                *self._adapters,
            ],
        )
        return await self._leases(found, endings)

    def _side_args(self) -> list[str | int]:
        """The arguments of variants.lua."""
        return [self._side.variant, self._side.weights, int(self._side.alone)]

    async def _leases(self, found: list[Any], endings: list[Any]) -> list[Lease]:
        replies: dict[str, list[Reply]] = {}
        leases = []
        for item in found:
            rid, gateway = item[0].decode(), item[2].decode()
            try:
                check_shard(rid, self.shard)
                binding = (self._model, rid)
                payload = await opened(self._sealer, PayloadKind.PAYLOAD, binding, item[5])
                leases.append(self._attempts.check(_lease(item, payload)))
            except MessageError as error:
                logger.warning(
                    "request is unreadable and fails",
                    extra={"request_id": rid, "error": str(error)},
                )
                refused = _refused(rid, int(item[1]), error)
                await self._end(
                    rid, int(item[1]), Outcome(failed=refused), "malformed", AttemptUsage()
                )
                replies.setdefault(gateway, []).append(refused)
        for rid, attempt, gateway, why in endings:
            message = failed(rid.decode(), int(attempt), FailureCode(why.decode()))
            replies.setdefault(gateway.decode(), []).append(message)
        if replies:
            await self._tell(replies)
        return leases

    async def _tell(self, replies: Mapping[str, Sequence[Reply]]) -> None:
        """Sends replies, best effort: a gateway that misses one asks for the stored outcome."""
        try:
            await self.publish(replies)
        except BackendUnavailable as error:
            logger.warning("endings not sent: redis is unreachable", extra={"error": str(error)})

    async def wait(self) -> None:
        """Like EngineQueue.wait. After a cancellation, the next call awaits the same read.

        That read began earlier, so it may return although nothing new has arrived since.
        """
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_until_new())
        left = self._free_at - time.monotonic()
        await asyncio.wait({self._reading}, timeout=None if left == math.inf else max(0.0, left))
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
        """Blocks until a queue has an entry after the last delivered one, or a wake-up arrives."""
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
                found[queue] = "$"  # the requests that were left come first
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
            args += [item.attempt, int(item.executing), item.usage.field, len(item.choices)]
            writer = f"{self.engine_id}/{item.attempt}"
            for number, choice in enumerate(item.choices):
                index = item.journaled[number]
                binding = (self._model, item.request_id, writer, number)
                args += [index, *self._journaled(choice, binding, index)]
        return [*names, *self._keys.fairness], args

    async def _publish_status(self, status: EngineStatus) -> None:
        name = self._keys.status(self.engine_id)
        now = self._connection.clock.now_ms()
        _, _, *found = await self._pipeline(
            ("SET", name, encode_status(status), "PX", self._lease_ms),
            ("SADD", self._keys.engines, self.engine_id),
            *self._side_beats.commands(now, takes_work=status.takes_work),
        )
        self._side_beats.learn(found, now)
        await self._connection.measure_clock(name)

    async def tell_shards(self, shards: int) -> int:
        now, name = self._connection.clock.now_ms(), self._keys.stats
        (fields,) = await self._pipeline(("HMGET", name, *SHARD_FIELDS))
        kept = shards_kept(fields, now)
        if note := shard_note(shards, kept, now):
            await self._pipeline(("HSET", name, *note))
        return max(shards, kept)

    async def tenant_use(self, apart: float) -> TenantUse | None:
        found = await self._connection.run(
            "tally", [self._keys.counters], [int(apart * 1000)], tries=1
        )
        if found is None:
            return None
        epoch, *pairs = [each.decode() for each in found] or [""]
        return TenantUse(epoch, dict(zip(pairs[::2], map(int, pairs[1::2]), strict=True)))

    async def add_tenant_use(self, uses: Mapping[int, TenantUse]) -> None:
        args: list[Any] = []
        for shard, use in uses.items():
            args += [shard, use.epoch, len(use.tokens), *itertools.chain(*use.tokens.items())]
        await self._connection.run("share", self._keys.fairness, args, tries=TRIES)

    async def _pipeline(self, *commands: Command) -> list[Any]:
        """Commands that may be repeated, in one round trip. Raises BackendUnavailable."""
        return await self._connection.attempt(
            lambda: self._connection.client.pipeline(commands), tries=TRIES
        )

    async def give_back(
        self,
        request_ids: Sequence[str],
        *,
        for_own_side: bool = False,
        handed_over: bool = False,
    ) -> None:
        shard, flags = self._keys, (int(for_own_side), int(handed_over))
        await self._run_many(
            "giveback",
            [
                (
                    [shard.record(rid), shard.wakeups, *shard.queues],
                    [rid, self.engine_id, "", 1, *flags],
                )
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
        journal = JournalReader(self._pipeline, self._sealer, self._model)
        return await journal.read(self._keys, request_id)

    async def resume(self, request_id: str, attempt: int, choices: Sequence[ChoiceState]) -> bool:
        args: list[Any] = [self.engine_id, attempt, keys.GRACE_MS]
        args += [self._side.variant, self._side.weights]
        writer = f"{self.engine_id}/{attempt}"
        for number, choice in enumerate(choices):
            args += self._journaled(choice, (self._model, request_id, writer, number), 0)
        names = [self._keys.record(request_id), self._keys.journal(request_id)]
        return bool(await self._connection.run("resume", names, args, tries=TRIES))

    def _journaled(self, choice: ChoiceState, binding: Binding, index: int) -> list[bytes | int]:
        """A choice's output from `index` as BEAT and RESUME write it to the journal.

        It is the number of tokens, the tokens, the choice's ending and the log probabilities.
        """
        tokens, ending = pack_tokens(choice.token_ids), encode_ending(choice)
        at = (*binding, index)
        return [
            len(choice.token_ids),
            self._piece(PayloadKind.JOURNAL, at, tokens),
            self._piece(PayloadKind.JOURNAL_ENDING, binding, ending),
            self._piece(PayloadKind.JOURNAL_LOGPROBS, at, encode_logprobs(choice.logprobs)),
        ]

    def _piece(self, kind: PayloadKind, binding: Binding, data: bytes) -> bytes:
        return self._sealer.seal(kind, binding, data) if data else b""

    async def publish(self, replies: Mapping[str, Sequence[Reply]]) -> None:
        commands: list[Command] = []
        now = time.monotonic()
        for gateway_id, items in replies.items():
            for part in frames_of(items):
                plain = encode_frame(Frame(self.engine_id, tuple(part)))
                frame = await sealed(self._sealer, PayloadKind.FRAME, (gateway_id,), plain)
                key = keys.frames_between(gateway_id, self.engine_id, self._model)
                commands += self._frame_commands(key, frame, now)
        if commands:
            await self._connection.attempt(lambda: self._write(commands), tries=TRIES)

    def _frame_commands(self, key: str, frame: bytes, now: float) -> list[Command]:
        """The commands that write one frame, and every RENEW_FRAMES set the stream's expiry."""
        oldest = max(0, self._newest_frame_ms - keys.FRAMES_KEPT_MS)
        write = ("XADD", key, "MINID", "~", oldest, "*", "f", frame)
        if now - self._renewed.get(key, -RENEW_FRAMES) < RENEW_FRAMES:
            return [write]
        self._renewed = {k: at for k, at in self._renewed.items() if now - at < RENEW_FRAMES}
        self._renewed[key] = now
        return [write, ("PEXPIRE", key, keys.FRAMES_TTL_MS)]

    async def _write(self, commands: list[Command]) -> None:
        written = await self._connection.client.pipeline(commands)
        self._newest_frame_ms = entry_id(written[0].decode())[0]

    async def controls(self) -> AsyncIterator[Control]:
        """Like EngineQueue.controls. Yields each message once, unless Redis was rolled back.

        A lost message is replaced: BEAT reports cancellations and changes of the gateway, and a new
        Takeover asks for another Resume.
        """

        async def first(client: RedisClient, name: str, cursor: str) -> str:
            newest = await client.command("XREVRANGE", name, "+", "-", "COUNT", 1)
            if not cursor or not newest:
                return "0-0"
            last: str = newest[0][0].decode()
            return min(cursor, last, key=entry_id)

        async for _, fields in entries(self._connection, self._streams_of_controls, first):
            try:
                yield await self._control(fields.get(b"c", b""))
            except MessageError as error:
                logger.warning("control message unreadable, skipped", extra={"error": str(error)})

    async def _control(self, data: bytes) -> Control:
        """Decodes a control message. The operator has no sealing keys. Raises MessageError."""
        if is_of_operator(data):
            return decode_control(data)
        return decode_control(
            await opened(self._sealer, PayloadKind.CONTROL, (self.engine_id,), data)
        )

    async def _streams_of_controls(self, client: RedisClient) -> list[str]:
        """The engine's own stream, and the shared one if its Redis user may read it.

        A user of one model may not, and gateways of older versions do not serve such a model.
        """
        shared = keys.shared_controls(self.engine_id)
        if self._reads_shared is None or self._reads_shared[0] is not client:
            try:
                await client.command("XREVRANGE", shared, "+", "-", "COUNT", 1)
            except NoPermissionError:
                self._reads_shared = (client, False)
            else:
                self._reads_shared = (client, True)
        own = keys.controls(self.engine_id, self._model)
        return [own, shared] if self._reads_shared[1] else [own]

    async def gateway_alive(self, gateway_id: str) -> bool:
        beat = keys.gateway_beat_to(gateway_id, self._model)
        (found,) = await self._pipeline(("EXISTS", beat))
        return bool(found)

    async def finish(
        self,
        request_id: str,
        attempt: int,
        outcome: Outcome,
        usage: AttemptUsage | None = None,
    ) -> bool:
        return await self._end(request_id, attempt, outcome, "", usage or AttemptUsage())

    async def _end(
        self, rid: str, attempt: int, outcome: Outcome, dead_letter: str, usage: AttemptUsage
    ) -> bool:
        """Runs FINISH. `dead_letter` is the reason to keep a dead letter; empty: keep none."""
        shard = self._keys
        names = [shard.record(rid), shard.payload(rid), shard.journal(rid)]
        plain = encode_outcome(outcome)
        args = [
            rid,
            self.engine_id,
            attempt,
            ended_state(outcome),
            outcome.failed.failure.value if outcome.failed else "",
            await sealed(self._sealer, PayloadKind.OUTCOME, (self._model, rid), plain),
            keys.ENDED_TTL_MS,
            dead_letter,
            sum(len(choice.token_ids) for choice in outcome.choices),
            usage.field,
        ]
        names += [shard.stats, shard.dead_letters, *shard.queues, shard.ledger, *shard.fairness]
        return bool(await self._connection.run("finish", names, args, tries=TRIES))

    async def close(self) -> None:
        """Removes the engine from the list of engines and closes the connections."""
        try:
            await self._connection.client.pipeline(
                [
                    ("DEL", self._keys.status(self.engine_id)),
                    ("SREM", self._keys.engines, self.engine_id),
                ]
            )
        except RedisError as error:
            logger.warning("not unregistered: redis is unreachable", extra={"error": str(error)})
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        await self._drop_waiter()
        await self._connection.close()


def _refused(request_id: str, attempt: int, error: MessageError) -> Failed:
    sealing = isinstance(error, SealingError)
    code = FailureCode.SEALED if sealing else FailureCode.MALFORMED
    return failed(request_id, attempt, code)


def _lease(item: list[Any], payload: bytes) -> Lease:
    """Raises MessageError."""
    _, attempt, gateway, recovered, suspect, _, placed, waited, left, whose = item
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
        foreign=whose > 0,
        abandoned=whose > 1,
    )


def _beat(item: Progress, result: list[Any]) -> Beat:
    verdict = Verdict(result[0].decode())
    gateway = result[1].decode() if len(result) > 1 else ""
    counts = tuple(int(count) for count in result[2:])
    return Beat(verdict=verdict, gateway_id=gateway, journaled=counts or item.journaled)


def _last_delivered(groups: Any) -> str:
    """The last entry that the group has read; the start if the stream or group does not exist."""
    if isinstance(groups, ResponseError):
        return "0-0"
    if isinstance(groups, Exception):
        raise groups
    for group in groups:
        if group["name"] == keys.GROUP.encode():
            last: bytes = group["last-delivered-id"]
            return last.decode()
    return "0-0"
