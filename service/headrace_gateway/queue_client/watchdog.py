"""Asks the queue about requests without news, and takes requests from silent engines.

It asks by admitting the request again, which changes nothing if an engine still runs it. The
watchdog reads no frames: the client tells it which engines were heard, and handles the result of
ADMIT.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from headrace_common.errors import BackendUnavailable, FailureCode, RequestConflict
from headrace_common.protocol.base import AdmitResult, AdmitState, GatewayQueue, QueueLimits

from .generation import Generation

logger = logging.getLogger(__name__)

AT_ONCE = 32  # requests about which the queue is asked together


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Times in seconds.

    An engine that sends nothing for `silence` seconds is given up. The queue is asked about a
    request without news after `recheck` seconds, then at intervals that double up to
    `longest_recheck`.
    """

    beat_interval: float = 3.0
    silence: float = 2.5
    recheck: float = 2.5
    longest_recheck: float = 20.0


@dataclass(slots=True)
class _Watch:
    """When the queue is next asked about a generation, and which engine has it, as far as is known.

    `silent_owner` is the engine and attempt that the queue named, if nothing was heard of it since
    `silent_since`. `released` is the engine and attempt from which the request was taken, until
    another engine has it. `lost` says that an engine ended it unnecessarily; the queue is then
    asked immediately.
    """

    due: float
    pause: float
    silent_owner: tuple[str, int] | None = None
    silent_since: float = 0.0
    released: tuple[str, int] | None = None
    lost: bool = False


@contextmanager
def isolated(generation: Generation) -> Iterator[None]:
    """Ends only this request if its state in the queue is corrupt. Engines of its model can write
    that state, and must not be able to end requests of other models. BackendUnavailable passes."""
    try:
        yield
    except BackendUnavailable:
        raise
    except Exception as error:
        fields = {"request_id": generation.request_id, "model": generation.request.model}
        logger.error("the state of a request in the queue is corrupt", extra=fields, exc_info=error)
        generation.fail(
            FailureCode.INTERNAL,
            "the request's state in the queue is corrupt; send the request again",
        )


class Watchdog:
    """Watches the generations in `active`. `now` is the client's clock; `admitted` handles the
    result of ADMIT.

    `heard`: when each engine was last heard, by its id and by the model whose engines may write to
    the stream ("" for a stream of all models). `unavailable_at`: when Redis was last out of reach,
    which does not count as an engine's silence.
    """

    def __init__(
        self,
        queue: GatewayQueue,
        limits: QueueLimits,
        config: ClientConfig,
        now: Callable[[], float],
        active: Mapping[str, Generation],
        admitted: Callable[[Generation, AdmitResult], Awaitable[None]],
    ) -> None:
        self._queue = queue
        self._limits = limits
        self._config = config
        self._now = now
        self._active = active
        self._admitted = admitted
        self._watches: dict[str, _Watch] = {}
        self.heard: dict[tuple[str, str], float] = {}
        self.unavailable_at = 0.0

    def begin(self, request_id: str) -> None:
        pause = self._config.recheck
        self._watches[request_id] = _Watch(self._now() + pause, pause)

    def end(self, request_id: str) -> None:
        self._watches.pop(request_id, None)

    def lost(self, generation: Generation) -> None:
        """Notes that an engine ended the request unnecessarily."""
        if watch := self._watches.get(generation.request_id):
            watch.lost = True

    def hears(self, engine_id: str, model: str) -> bool:
        """Whether an engine of a model was heard lately."""
        return self._now() - self._heard_at(engine_id, model) < self._config.silence

    def _heard_at(self, engine_id: str, model: str) -> float:
        return max(self.heard.get((engine_id, where), 0.0) for where in (model, ""))

    async def note_queued_again(self, generation: Generation) -> None:
        """Notes that a request is queued again, and renews this gateway's beat.

        The next engine asks this gateway which tokens the client has, but only if the gateway's
        beat is in Redis, which may have lost it together with the request.
        """
        fields = {"request_id": generation.request_id, "attempt": generation.arbiter.attempt}
        logger.warning("request queued again", extra=fields)
        if watch := self._watches.get(generation.request_id):
            watch.released = generation.arbiter.owner
        await self._queue.beat()

    async def run(self) -> None:
        """Runs until no request is in flight."""
        while self._active:
            await asyncio.sleep(self._config.silence / 4)
            try:
                await self._ask(self._due())
            except BackendUnavailable as error:
                self.unavailable_at = self._now()
                logger.warning(
                    "redis unavailable, requests are checked again later",
                    extra={"error": str(error)},
                )
            horizon = self._now() - 100 * self._config.silence
            self.heard = {k: at for k, at in self.heard.items() if at > horizon}

    def _due(self) -> list[tuple[Generation, _Watch]]:
        watched = ((generation, self._watches.get(rid)) for rid, generation in self._active.items())
        now = self._now()
        return [
            (generation, watch)
            for generation, watch in watched
            if watch is not None and self._is_due(generation, watch, now)
        ]

    async def _ask(self, due: Sequence[tuple[Generation, _Watch]]) -> None:
        """Asks about requests, several at once, so that they share packets. Raises
        BackendUnavailable after those that were asked with the one that failed."""
        for first in range(0, len(due), AT_ONCE):
            asked = (self._recheck(*each) for each in due[first : first + AT_ONCE])
            for result in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result

    def _is_due(self, generation: Generation, watch: _Watch, now: float) -> bool:
        """Whether to ask the queue about a request. It is no coroutine: most requests are not due,
        and there may be thousands."""
        owner = generation.arbiter.owner or watch.silent_owner
        if generation.holder is not None:
            owner = None  # its holder watches the engine
        if watch.lost:
            return True
        if owner not in (None, watch.released) and self._is_silent(owner[0], generation, watch):
            return True
        if now - generation.heard_at < self._config.recheck:
            watch.due, watch.pause = now + self._config.recheck, self._config.recheck
            return False
        return now >= watch.due

    def _is_silent(self, engine_id: str, generation: Generation, watch: _Watch) -> bool:
        """Whether an engine that could have sent something did not."""
        heard = self._heard_at(engine_id, generation.request.model)
        since = max(heard, generation.heard_at, watch.silent_since, self.unavailable_at)
        return self._now() - since > self._config.silence

    async def _recheck(self, generation: Generation, watch: _Watch) -> None:
        if not generation.ended:
            with isolated(generation):
                await self._admit_again(generation, watch, self._now())

    async def _admit_again(self, generation: Generation, watch: _Watch, now: float) -> None:
        """Admits a request again; takes it from its engine if that was silent before and still
        is."""
        watch.due = now + watch.pause
        watch.pause = min(2 * watch.pause, self._config.longest_recheck)
        try:
            admission = await self._queue.admit(
                generation.request,
                self._limits,
                seen=generation.arbiter.attempt,
                polite=generation.shared,
            )
        except RequestConflict:
            generation.fail(FailureCode.INTERNAL, "the request's id is in use for another one")
            return
        watch.lost = False
        if generation.ended:
            return
        await self._admitted(generation, admission)
        if admission.state is AdmitState.ADMITTED:
            await self.note_queued_again(generation)
        if admission.state is not AdmitState.ATTACHED or admission.owner is None:
            watch.silent_owner = None
            return
        await self._release_if_silent(generation, watch, (admission.owner, admission.attempt), now)

    async def _release_if_silent(
        self, generation: Generation, watch: _Watch, owner: tuple[str, int], now: float
    ) -> None:
        """Records an owner that is silent; releases the request if it stays silent."""
        if owner not in (watch.silent_owner, generation.arbiter.owner):
            # A new owner gets the usual time.
            watch.silent_owner, watch.silent_since = owner, now
        elif self._is_silent(owner[0], generation, watch):
            logger.warning(
                "engine silent, request released",
                extra={"request_id": generation.request_id, "engine_id": owner[0]},
            )
            await self._queue.release(generation.request_id, generation.request.model, *owner)
            watch.released = owner
