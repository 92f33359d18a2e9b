"""Combines the shards of a model's queue into the one queue that an engine takes from.

Each request stays in the shard that its id names. This module only decides where to look first;
each shard decides what is handed out to whom.
"""

import asyncio
import logging
import math
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import replace
from typing import TypeVar

from ...errors import BackendUnavailable
from ...wire.keys import shard_of
from ...wire.messages import ChoiceState, Control, GenerateRequest, Reply
from ..base import (
    Beat,
    EngineStatus,
    Lease,
    Outcome,
    Progress,
    ShardQueue,
    TakeBounds,
    TenantUse,
)
from ..ledger import AttemptUsage

logger = logging.getLogger(__name__)
T = TypeVar("T")

TELL = 3.0  # seconds between two reads of the number of shards
PAUSE = 1.0  # seconds before a shard that was unreachable is asked again
STATUS = 1.0  # seconds between two writes of a status when only other shards send beats
SHARE = 1.0  # seconds between two exchanges of what tenants have used in each shard
SHARE_PATIENCE = 1.0  # seconds for which a beat waits for an exchange


class ShardedEngineQueue:
    """An EngineQueue over several shards. `make` makes the queue of one shard.

    `shards` is the number that gateways may use. `reap_every` is the minimal number of seconds
    between two searches of all shards for requests of silent engines, `share_every` that between
    two exchanges of what tenants have used, by any engine.

    It also takes from further shards as long as engines with a higher setting were lately present,
    so that no request stays in a shard without engines. With one shard it is that shard's queue.
    """

    def __init__(
        self,
        make: Callable[[int], ShardQueue],
        shards: int,
        *,
        reap_every: float = 1.0,
        share_every: float = SHARE,
    ) -> None:
        self._make = make
        self._count = shards
        self._shards = [make(number) for number in range(shards)]
        self._first = self._shards[0]
        self.engine_id = self._first.engine_id
        self._reap_every = reap_every
        self._share_every = share_every
        self._turn = 0
        self._lacking_room: ShardQueue | None = None
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._empty: set[int] = set()
        self._woken: set[int] = set()
        self._told_at = self._reaped_at = self._said_at = self._shared_at = -math.inf
        self._said: EngineStatus | None = None
        self._sharing: asyncio.Task[None] | None = None
        self._adapters: tuple[str, ...] = ()
        self._bounds = TakeBounds()

    async def start(self) -> None:
        """Like EngineQueue.start.

        A further shard may be unreachable; it is used once it is back.
        """
        await self._first.start()
        for shard in self._shards[1:]:
            await _start(shard)
        await self._look_for_more()

    async def _look_for_more(self) -> None:
        """Adds the further shards that may hold requests."""
        self._told_at = time.monotonic()
        kept = await self._first.tell_shards(self._count)
        for number in range(len(self._shards), kept):
            shard = self._make(number)
            shard.serve_adapters(self._adapters)
            shard.limit(self._bounds)
            await _start(shard)
            self._shards.append(shard)

    # Leases

    def serve_adapters(self, adapters: Collection[str]) -> None:
        self._adapters = tuple(adapters)
        for shard in self._shards:
            shard.serve_adapters(self._adapters)

    def limit(self, bounds: TakeBounds) -> None:
        self._bounds = bounds
        for shard in self._shards:
            shard.limit(bounds)

    async def engines(self) -> Sequence[EngineStatus]:
        return await self._first.engines()

    async def take(
        self, count: int, prompt_tokens: int | None = None, low_priority: int | None = None
    ) -> Sequence[Lease]:
        """Like EngineQueue.take: a part from each shard, then more from shards that have more.

        Each call starts with another shard. If the next request of a shard does not fit, nothing is
        taken from other shards until it does; otherwise they would use up the room again and again.
        """
        if len(self._shards) == 1:
            return await self._first.take(count, prompt_tokens, low_priority)
        leases: list[Lease] = []
        if self._lacking_room is None:
            self._turn = (self._turn + 1) % len(self._shards)
        self._lacking_room = None
        turn = [shard for shard in self._order() if not self._is_empty(shard.shard)]
        while turn and len(leases) < count:
            more = []
            for place, shard in enumerate(turn):
                wanted = -(-(count - len(leases)) // (len(turn) - place))
                found = (
                    await self._take(shard, wanted, prompt_tokens, low_priority) if wanted else ()
                )
                if low_priority is not None:
                    low_priority -= sum(each.request.priority > 0 for each in found)
                if prompt_tokens is not None:
                    prompt_tokens -= sum(len(each.request.prompt_token_ids) for each in found)
                leases += found
                if wanted and shard.lacks_room and not self._is_empty(shard.shard):
                    self._turn, self._lacking_room = shard.shard, shard
                    return leases
                if found and len(found) == wanted:
                    more.append(shard)
            turn = more
        return leases

    def _order(self) -> list[ShardQueue]:
        """All shards, starting with the one whose turn it is."""
        return self._shards[self._turn :] + self._shards[: self._turn]

    def _is_empty(self, number: int) -> bool:
        """Whether the shard was empty and nothing has arrived since."""
        watch = self._watches.get(number)
        return number in self._empty and watch is not None and not watch.done()

    async def _take(
        self, shard: ShardQueue, count: int, tokens: int | None, low_priority: int | None
    ) -> Sequence[Lease]:
        """Takes from one shard; nothing while the shard is unreachable."""
        await self._unwatch(shard.shard)
        self._empty.discard(shard.shard)
        try:
            found = await shard.take(count, tokens, low_priority)
        except BackendUnavailable as error:
            _note_away(shard, error)
            self._leave_alone(shard)
            return ()
        if len(found) < count and not shard.holds_more:
            self._watch_empty(shard)
        return found

    def _watch_empty(self, shard: ShardQueue) -> None:
        self._empty.add(shard.shard)
        self._watch(shard)

    def _leave_alone(self, shard: ShardQueue) -> None:
        """Pauses a shard that may be readable but refuses writes."""

        async def watch() -> None:
            await asyncio.sleep(PAUSE)
            await shard.wait()

        self._empty.add(shard.shard)
        self._watches[shard.shard] = asyncio.create_task(watch())

    def _watch(self, shard: ShardQueue) -> "asyncio.Task[None]":
        if shard.shard not in self._watches:
            self._watches[shard.shard] = asyncio.create_task(shard.wait())
        return self._watches[shard.shard]

    async def _unwatch(self, number: int) -> None:
        watch = self._watches.pop(number, None)
        if watch is None:
            return
        if watch.done():
            self._woken.add(number)
            watch.result()
        else:
            watch.cancel()
            await asyncio.wait({watch})

    async def wait(self) -> None:
        """Like EngineQueue.wait, for all shards that can be taken from."""
        if len(self._shards) == 1:
            return await self._first.wait()
        shards = self._shards if self._lacking_room is None else [self._lacking_room]
        watches = {self._watch(shard): shard.shard for shard in shards}
        done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        for watch in done:
            number = watches[watch]
            self._woken.add(number)
            del self._watches[number]
            watch.result()
        return None

    async def reap(self, count: int, *, suspects: bool = True) -> Sequence[Lease]:
        """Like EngineQueue.reap: in shards with news, and every `reap_every` seconds in all."""
        if len(self._shards) == 1:
            return await self._first.reap(count, suspects=suspects)
        now = time.monotonic()
        woken, self._woken = self._woken, set()
        if now - self._reaped_at >= self._reap_every:
            woken, self._reaped_at = set(range(len(self._shards))), now
        leases: list[Lease] = []
        for shard in self._order():
            room = count - len(leases)
            if shard.shard in woken and room:
                leases += await self._reap(shard, room, suspects=suspects)
                suspects = suspects and not any(lease.suspect for lease in leases)
            elif shard.shard in woken:
                self._woken.add(shard.shard)
        return leases

    async def _reap(self, shard: ShardQueue, room: int, *, suspects: bool) -> Sequence[Lease]:
        """Reaps one shard; nothing if it is unreachable, so that leases of other shards are not
        lost."""
        try:
            return await shard.reap(room, suspects=suspects)
        except BackendUnavailable as error:
            _note_away(shard, error)
            return ()

    async def beat(self, progress: Sequence[Progress], status: EngineStatus) -> Mapping[str, Beat]:
        """Like EngineQueue.beat. If some shards are unreachable, returns the verdicts of the
        others."""
        if time.monotonic() - self._told_at >= TELL:
            try:
                await self._look_for_more()
            except BackendUnavailable as error:
                _note_away(self._first, error)
        if len(self._shards) == 1:
            return await self._first.beat(progress, status)
        await self._share_if_due()
        status = replace(status, shards=self._count)
        parts = self._by_shard(progress, lambda item: item.request_id)
        calls = [shard.renew(items) for shard, items in parts if shard is not self._first]
        own = [item for shard, items in parts if shard is self._first for item in items]
        if own or self._is_news(status):
            calls.append(self._beat_first(own, status))
        beats: dict[str, Beat] = {}
        for found in await _all_that_can(calls):
            beats.update(found)
        return beats

    async def _share_if_due(self) -> None:
        """Begins an exchange if one is due and none runs. A slow one delays no further beat, and
        several beats may run at once."""
        if time.monotonic() - self._shared_at < self._share_every:
            return
        sharing = self._sharing
        if sharing is None:
            sharing = self._sharing = asyncio.create_task(self._share_tenant_use())
            await asyncio.wait({sharing}, timeout=SHARE_PATIENCE)
        if sharing.done() and self._sharing is sharing:
            self._sharing = None
            self._shared_at = time.monotonic()
            sharing.result()

    async def _share_tenant_use(self) -> None:
        """Adds what tenants have used in each shard to the counters of all other shards.

        One engine at a time does it, as the first shard says. An unreachable shard is left out.
        """
        uses: dict[int, TenantUse] = {}
        for shard in self._shards:
            try:
                use = await shard.tenant_use(0.0 if uses else self._share_every)
            except BackendUnavailable as error:
                _note_away(shard, error)
                continue
            if use is None:
                return
            uses[shard.shard] = use
        for shard in self._shards:
            others = {number: use for number, use in uses.items() if number != shard.shard}
            if shard.shard not in uses or not any(use.tokens for use in others.values()):
                continue
            try:
                await shard.add_tenant_use(others)
            except BackendUnavailable as error:
                _note_away(shard, error)

    def _is_news(self, status: EngineStatus) -> bool:
        """Whether to write the status now.

        It limits writes that only the beats of other shards cause.
        """
        late = time.monotonic() - self._said_at >= STATUS
        return late or self._said is None or status.takes_work != self._said.takes_work

    async def _beat_first(
        self, own: Sequence[Progress], status: EngineStatus
    ) -> Mapping[str, Beat]:
        beats = await self._first.beat(own, status)
        self._said, self._said_at = status, time.monotonic()
        return beats

    async def give_back(
        self,
        request_ids: Sequence[str],
        *,
        for_own_side: bool = False,
        handed_over: bool = False,
    ) -> None:
        parts = self._by_shard(request_ids, str)
        await asyncio.gather(
            *(
                shard.give_back(ids, for_own_side=for_own_side, handed_over=handed_over)
                for shard, ids in parts
            )
        )

    def _by_shard(
        self, items: Iterable[T], id_of: Callable[[T], str]
    ) -> list[tuple[ShardQueue, list[T]]]:
        parts: dict[int, list[T]] = {}
        for item in items:
            parts.setdefault(shard_of(id_of(item)), []).append(item)
        return [(self._shards[number], part) for number, part in parts.items()]

    def _of(self, request_id: str) -> ShardQueue:
        return self._shards[shard_of(request_id)]

    async def image(self, request: GenerateRequest, digest: bytes) -> bytes | None:
        return await self._of(request.request_id).image(request, digest)

    # Output

    async def journal(self, request_id: str) -> tuple[ChoiceState, ...] | None:
        return await self._of(request_id).journal(request_id)

    async def resume(self, request_id: str, attempt: int, choices: Sequence[ChoiceState]) -> bool:
        return await self._of(request_id).resume(request_id, attempt, choices)

    async def finish(
        self,
        request_id: str,
        attempt: int,
        outcome: Outcome,
        usage: AttemptUsage | None = None,
    ) -> bool:
        return await self._of(request_id).finish(request_id, attempt, outcome, usage)

    async def publish(self, replies: Mapping[str, Sequence[Reply]]) -> None:
        await self._first.publish(replies)

    def controls(self) -> AsyncIterator[Control]:
        return self._first.controls()

    async def gateway_alive(self, gateway_id: str) -> bool:
        return await self._first.gateway_alive(gateway_id)

    async def close(self) -> None:
        tasks = [*self._watches.values(), *([self._sharing] if self._sharing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for shard in reversed(self._shards):
            await shard.close()


async def _start(shard: ShardQueue) -> None:
    """Starts a shard.

    If that fails, the shard is usable nevertheless; it may wake the engine once without a request.
    """
    try:
        await shard.start()
    except BackendUnavailable as error:
        _note_away(shard, error)


def _note_away(shard: ShardQueue, error: BackendUnavailable) -> None:
    """Logs that a shard is unreachable: its failure must not lose the leases of the others."""
    extra = {"shard": shard.shard, "error": str(error)}
    logger.warning("a shard of the queue is unavailable; the others are used", extra=extra)


async def _all_that_can(calls: Sequence[Awaitable[T]]) -> list[T]:
    """The results of calls to different shards, without those of unreachable shards.

    Raises BackendUnavailable if all are unreachable.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    found: list[T] = []
    away: BackendUnavailable | None = None
    for result in results:
        if isinstance(result, BackendUnavailable):
            away = result
            logger.warning(
                "a shard of the queue is unavailable; the others are used",
                extra={"error": str(result)},
            )
        elif isinstance(result, BaseException):
            raise result
        else:
            found.append(result)
    if away is not None and not found:
        raise away
    return found
