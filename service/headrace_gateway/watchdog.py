"""Asks about requests in flight of which nothing is heard, and takes them from silent engines.

Where nothing was heard for a while a request is admitted again, which changes nothing if all is
well. Reads no frames: its client says which engines were heard, and follows what ADMIT says.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from headrace_common.errors import BackendUnavailable, FailureCode, RequestConflict
from headrace_common.protocol.base import Admission, AdmitState, GatewayQueue, QueueLimits

from .generation import Generation, GenerationState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Times in seconds.

    `silence`: an engine that sent nothing for this long is given up. `recheck`: a request of which
    nothing was heard is asked about after this long, then twice, up to `longest_recheck`.
    """

    beat_interval: float = 3.0
    silence: float = 2.5
    recheck: float = 2.5
    longest_recheck: float = 20.0


@dataclass(slots=True)
class _Watch:
    """When a generation is next asked about, and which engine is then believed to have it.

    `released`: the engine and attempt that it was taken from, while nobody else has it. `lost`: an
    engine has ended it without having to, which is asked about at once.
    """

    due: float
    pause: float
    suspect: tuple[str, int] | None = None
    suspected_at: float = 0.0
    released: tuple[str, int] | None = None
    lost: bool = False


class Watchdog:
    """`active` are the client's generations by request, `now` its clock, `admitted` takes what
    ADMIT said of one. `heard`: when each engine last said anything; `unavailable_at`: when Redis
    could last not be reached, which is no engine's silence.
    """

    def __init__(
        self,
        queue: GatewayQueue,
        limits: QueueLimits,
        config: ClientConfig,
        now: Callable[[], float],
        active: Mapping[str, Generation],
        admitted: Callable[[Generation, Admission], Awaitable[None]],
    ) -> None:
        self._queue = queue
        self._limits = limits
        self._config = config
        self._now = now
        self._active = active
        self._admitted = admitted
        self._watches: dict[str, _Watch] = {}
        self.heard: dict[str, float] = {}
        self.unavailable_at = 0.0

    def begin(self, request_id: str) -> None:
        pause = self._config.recheck
        self._watches[request_id] = _Watch(self._now() + pause, pause)

    def end(self, request_id: str) -> None:
        self._watches.pop(request_id, None)

    def lost(self, generation: Generation) -> None:
        """An engine has ended it without having to."""
        if watch := self._watches.get(generation.request_id):
            watch.lost = True

    def hears(self, engine_id: str) -> bool:
        """Whether an engine has said something lately."""
        return self._now() - self.heard.get(engine_id, 0.0) < self._config.silence

    async def queued_again(self, generation: Generation) -> None:
        """Who takes it now asks here what its client has, unless this gateway seems to be gone:
        Redis may have lost its beat as well."""
        fields = {"request_id": generation.request_id, "attempt": generation.arbiter.attempt}
        logger.warning("request queued again", extra=fields)
        if watch := self._watches.get(generation.request_id):
            watch.released = generation.arbiter.owner
        await self._queue.beat()

    async def run(self) -> None:
        """Until no request is in flight."""
        while self._active:
            await asyncio.sleep(self._config.silence / 4)
            try:
                for generation in list(self._active.values()):
                    await self._check(generation, self._now())
            except BackendUnavailable as error:
                self.unavailable_at = self._now()
                logger.warning("redis unavailable, will ask again", extra={"error": str(error)})
            horizon = self._now() - 100 * self._config.silence
            self.heard = {k: at for k, at in self.heard.items() if at > horizon}

    async def _check(self, generation: Generation, now: float) -> None:
        watch = self._watches.get(generation.request_id)
        if watch is None:
            return
        owner = generation.arbiter.owner or watch.suspect
        if generation.holder is not None:
            owner = None  # it is its holder that looks after the engine
        if owner in (None, watch.released):
            silent = False
        else:
            silent = self._is_silent(owner[0], generation, watch)
        if silent or watch.lost:
            await self._recheck(generation, watch, now)
        elif now - generation.heard_at < self._config.recheck:
            watch.due, watch.pause = now + self._config.recheck, self._config.recheck
        elif now >= watch.due:
            await self._recheck(generation, watch, now)

    def _is_silent(self, engine_id: str, generation: Generation, watch: _Watch) -> bool:
        """Whether an engine could have spoken and did not."""
        heard = self.heard.get(engine_id, 0.0)
        since = max(heard, generation.heard_at, watch.suspected_at, self.unavailable_at)
        return self._now() - since > self._config.silence

    async def _recheck(self, generation: Generation, watch: _Watch, now: float) -> None:
        """Admits a request again; takes it from an engine that was silent then and is still."""
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
        if generation.state is GenerationState.ENDED:
            return
        await self._admitted(generation, admission)
        if admission.state is AdmitState.ADMITTED:
            await self.queued_again(generation)
        if admission.state is not AdmitState.ATTACHED or admission.owner is None:
            watch.suspect = None
            return
        await self._suspect(generation, watch, (admission.owner, admission.attempt), now)

    async def _suspect(
        self, generation: Generation, watch: _Watch, owner: tuple[str, int], now: float
    ) -> None:
        """`owner` has the request, and nothing was heard of that."""
        if owner not in (watch.suspect, generation.arbiter.owner):
            # First seen now: it has the usual time to say something.
            watch.suspect, watch.suspected_at = owner, now
        elif self._is_silent(owner[0], generation, watch):
            logger.warning(
                "engine silent, request released",
                extra={"request_id": generation.request_id, "engine_id": owner[0]},
            )
            await self._queue.release(generation.request_id, generation.request.model, *owner)
            watch.released = owner
