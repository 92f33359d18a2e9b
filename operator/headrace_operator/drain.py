"""Loss-free scale-down: which engine goes, how it is told, and when it has gone.

A victim's pod is marked as the cheapest to delete, its engine is told through the queue to drain,
and only when it has nothing left, or its time is up, the Deployment is lowered by one. Kubernetes
then removes that pod: not ready comes before ready, the marked before others. SIGTERM drains too,
so nothing is lost where any of this is missed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace_common.messages import Drain
from headrace_common.protocol.base import EngineStatus
from headrace_common.protocol.connection import Connection
from headrace_common.protocol.redis_gateway import RedisGatewayQueue

from . import names


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePod:
    """A pod and the engine in it. `status` is None where no engine of it beats."""

    name: str
    ready: bool
    created: str = ""
    status: EngineStatus | None = None
    cached_blocks: float = 0.0

    @property
    def worth(self) -> tuple[bool, int, float, float]:
        """What its end would cost, least first: work in flight, then cache."""
        running = 0 if self.status is None else self.status.running
        used = 0.0 if self.status is None else self.status.kv_utilization
        return self.ready, running, self.cached_blocks, used


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """A victim. `engine_id` is empty where its pod had no engine; `since` is Unix seconds."""

    pod: str
    engine_id: str
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPlan:
    """`tell` are the engines among `waiting` that have not yet said that they drain."""

    start: tuple[Draining, ...] = ()
    waiting: tuple[Draining, ...] = ()
    ended: tuple[Draining, ...] = ()
    cancelled: tuple[Draining, ...] = ()

    def tell(self, pods: Sequence[EnginePod]) -> tuple[str, ...]:
        deaf = {
            pod.status.engine_id
            for pod in pods
            if pod.status is not None and not pod.status.draining
        }
        return tuple(d.engine_id for d in (*self.start, *self.waiting) if d.engine_id in deaf)


def plan(
    pods: Sequence[EnginePod],
    draining: Sequence[Draining],
    *,
    surplus: int,
    now: float,
    timeout: float,
) -> DrainPlan:
    """What to do for `surplus` engines too many, of which `draining` have been chosen before.

    Those that are chosen and no more needed are given back, the newest first: their engine is
    started anew in its pod.
    """
    ordered = sorted(draining, key=lambda victim: victim.since)
    kept, cancelled = ordered[: max(0, surplus)], ordered[max(0, surplus) :]
    ended = tuple(victim for victim in kept if _ended(victim, pods, now, timeout))
    waiting = tuple(victim for victim in kept if victim not in ended)
    chosen = {victim.pod for victim in draining}
    free = [pod for pod in pods if pod.name not in chosen]
    start = tuple(_victim(pod, now) for pod in choose(free, max(0, surplus - len(kept))))
    return DrainPlan(start=start, waiting=waiting, ended=ended, cancelled=tuple(cancelled))


def choose(pods: Sequence[EnginePod], count: int) -> list[EnginePod]:
    """The pods that go first: not ready, then least work, then least cache, then the youngest."""
    youngest_first = sorted(pods, key=lambda pod: (pod.created, pod.name), reverse=True)
    return sorted(youngest_first, key=lambda pod: pod.worth)[:count]


def _victim(pod: EnginePod, now: float) -> Draining:
    engine_id = "" if pod.status is None else pod.status.engine_id
    return Draining(pod=pod.name, engine_id=engine_id, since=now)


def _ended(victim: Draining, pods: Sequence[EnginePod], now: float, timeout: float) -> bool:
    """Gone, or without work and taking none, or out of time: then SIGTERM gives back the rest."""
    if now - victim.since >= timeout:
        return True
    for pod in pods:
        if pod.name == victim.pod and pod.status is not None:
            if pod.status.engine_id == victim.engine_id:
                return pod.status.draining and pod.status.running == 0
    return True


class EngineDirectory(Protocol):
    """The engines of a model, and the way to tell one to drain. Raises BackendUnavailable."""

    async def engines(self, model: str) -> Sequence[EngineStatus]: ...

    async def drain(self, engine_id: str) -> None: ...


class QueueDirectory:
    """An EngineDirectory over the queue's Redis."""

    def __init__(self, connection: Connection) -> None:
        self._queue = RedisGatewayQueue(connection, names.FIELD_MANAGER)

    async def engines(self, model: str) -> Sequence[EngineStatus]:
        return await self._queue.engines(model)

    async def drain(self, engine_id: str) -> None:
        await self._queue.send(engine_id, Drain())
