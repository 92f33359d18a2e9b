"""Scale-down without loss: chooses the engines that go, drains them, and finds when they are done.

A victim's pod is marked as the cheapest to delete, and its engine is told through the queue to
drain. When it has no work left or its time is over, the workload's count is lowered by one.
Kubernetes then removes that pod: not ready before ready, marked before others. Until then the
engine keeps running, so that the kubelet does not restart it. SIGTERM drains too, so nothing is
lost if one of these steps is missed.

Of engines that span several pods Kubernetes always removes those with the highest numbers, so these
are the victims.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from headrace_common.protocol.base import EngineStatus
from headrace_common.protocol.redis.client.connection import Connection
from headrace_common.protocol.redis.gateway import RedisGatewayQueue
from headrace_common.wire.messages import Drain, Recall

from .. import names


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePod:
    """A pod and its engine. `status` is None if the pod has no live engine.

    `index` is the engine's number if it spans several pods, of which this is the first.
    """

    name: str
    ready: bool
    created: str = ""
    status: EngineStatus | None = None
    cached_blocks: float = 0.0
    index: int | None = None

    @property
    def deletion_cost(self) -> tuple[bool, int, float, float]:
        """The cost of ending it, for sorting: running work, then cache."""
        running = 0 if self.status is None else self.status.running
        used = 0.0 if self.status is None else self.status.kv_utilization
        return self.ready, running, self.cached_blocks, used


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """A victim. `engine_id` is empty if its pod had no engine; `since` is in Unix seconds."""

    pod: str
    engine_id: str
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPlan:
    """The victims to start, to wait for, that have ended, and that are no longer needed."""

    start: tuple[Draining, ...] = ()
    waiting: tuple[Draining, ...] = ()
    ended: tuple[Draining, ...] = ()
    cancelled: tuple[Draining, ...] = ()

    def engines_to_drain(self, pods: Sequence[EnginePod]) -> tuple[str, ...]:
        """The ids of victims' engines that do not drain yet."""
        serving = {
            pod.status.engine_id
            for pod in pods
            if pod.status is not None and not pod.status.draining
        }
        return tuple(d.engine_id for d in (*self.start, *self.waiting) if d.engine_id in serving)


def plan(
    pods: Sequence[EnginePod],
    draining: Sequence[Draining],
    *,
    surplus: int,
    now: float,
    timeout: float,
) -> DrainPlan:
    """The plan for `surplus` superfluous engines, of which `draining` were chosen before.

    If fewer engines must go than were chosen, the newest victims are cancelled and their engines
    recalled.
    """
    ordered = sorted(draining, key=lambda victim: victim.since)
    kept, cancelled = ordered[: max(0, surplus)], ordered[max(0, surplus) :]
    ended = tuple(victim for victim in kept if _ended(victim, pods, now, timeout))
    waiting = tuple(victim for victim in kept if victim not in ended)
    chosen = {victim.pod for victim in draining}
    free = [pod for pod in pods if pod.name not in chosen]
    start = tuple(_victim(pod, now) for pod in choose(free, max(0, surplus - len(kept))))
    return DrainPlan(start=start, waiting=waiting, ended=ended, cancelled=tuple(cancelled))


def plan_from_top(
    pods: Sequence[EnginePod],
    draining: Sequence[Draining],
    *,
    deployed: int,
    desired: int,
    now: float,
    timeout: float,
) -> DrainPlan:
    """The plan for engines with numbers, of which the highest go.

    A victim has not ended before those with higher numbers. An engine without a pod needs no drain.
    """
    present = {pod.index: pod for pod in pods}
    known = {victim.pod: victim for victim in draining}
    going = [present[i] for i in range(deployed - 1, desired - 1, -1) if i in present]
    victims = [known.get(pod.name) or _victim(pod, now) for pod in going]
    ended = tuple(takewhile(lambda victim: _ended(victim, pods, now, timeout), victims))
    rest = victims[len(ended) :]
    chosen = {victim.pod for victim in victims}
    return DrainPlan(
        start=tuple(victim for victim in rest if victim.pod not in known),
        waiting=tuple(victim for victim in rest if victim.pod in known),
        ended=ended,
        cancelled=tuple(victim for victim in draining if victim.pod not in chosen),
    )


def highest_kept(pods: Sequence[EnginePod], planned: DrainPlan, *, desired: int) -> int:
    """The count above which no engine with a number has to stay."""
    kept = {victim.pod for victim in (*planned.start, *planned.waiting)}
    counts = (pod.index + 1 for pod in pods if pod.index is not None and pod.name in kept)
    return max((desired, *counts))


def engines_to_recall(pods: Sequence[EnginePod], victims: Sequence[str]) -> tuple[str, ...]:
    """The ids of engines that drain although their pods are not victims."""
    return tuple(
        pod.status.engine_id
        for pod in pods
        if pod.name not in victims and pod.status is not None and pod.status.draining
    )


def choose(pods: Sequence[EnginePod], count: int) -> list[EnginePod]:
    """The pods that go first: not ready, then least work, then least cache, then the youngest."""
    youngest_first = sorted(pods, key=lambda pod: (pod.created, pod.name), reverse=True)
    return sorted(youngest_first, key=lambda pod: pod.deletion_cost)[:count]


def _victim(pod: EnginePod, now: float) -> Draining:
    engine_id = "" if pod.status is None else pod.status.engine_id
    return Draining(pod=pod.name, engine_id=engine_id, since=now)


def _ended(victim: Draining, pods: Sequence[EnginePod], now: float, timeout: float) -> bool:
    """Whether a victim has ended, drained or exceeded its time; SIGTERM gives back the rest."""
    if now - victim.since >= timeout:
        return True
    for pod in pods:
        if pod.name == victim.pod and pod.status is not None:
            if pod.status.engine_id == victim.engine_id:
                return pod.status.draining and pod.status.running == 0
    return True


class EngineControl(Protocol):
    """Lists the engines of a model, and tells them to drain or to serve again.

    Raises BackendUnavailable.
    """

    async def engines(self, model: str) -> Sequence[EngineStatus]: ...

    async def drain(self, engine_id: str, model: str, within: float = math.inf) -> None:
        """Tells an engine to drain; it has to end `within` seconds."""

    async def recall(self, engine_id: str, model: str) -> None: ...


class QueueEngineControl:
    """An EngineControl over the queue's Redis."""

    def __init__(self, connection: Connection) -> None:
        self._queue = RedisGatewayQueue(connection, names.FIELD_MANAGER)

    async def engines(self, model: str) -> Sequence[EngineStatus]:
        return await self._queue.engines(model)

    async def drain(self, engine_id: str, model: str, within: float = math.inf) -> None:
        limit = None if within == math.inf else round(within * 1000)
        await self._queue.send(engine_id, model, Drain(within_ms=limit))

    async def recall(self, engine_id: str, model: str) -> None:
        await self._queue.send(engine_id, model, Recall())
