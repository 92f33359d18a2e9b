"""The feed reads only while a console watches, and survives invalid data."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.base import CanaryPlan, EngineStatus, QueueDepth
from headrace_common.protocol.live import EngineSight, EngineSnapshot, ModelSight
from headrace_gateway.console.live_feed import MAX_ENGINES, LiveFeed, LiveSources
from headrace_gateway.console.live_view import LiveView
from headrace_gateway.models.models import Models
from headrace_gateway.queue_client.engines import EngineDirectory
from headrace_testing.gateway import engine_status
from headrace_testing.live import make_sequence, make_snapshot


@dataclass(slots=True)
class Fleet:
    """Engines, a queue and a LiveStore in one object, which counts how often it is read."""

    models: Models
    statuses: list[EngineStatus] = field(default_factory=lambda: [engine_status(shows_batch=True)])
    snapshots: dict[str, EngineSnapshot] = field(default_factory=dict)
    watched: list[str] = field(default_factory=list)
    reads: int = 0
    failure: Exception | None = None

    async def engines(self, model: str) -> Sequence[EngineStatus]:
        return self.statuses

    async def canary_plan(self, model: str) -> CanaryPlan:
        return CanaryPlan()

    async def depth(self, model: str) -> QueueDepth:
        self.reads += 1
        if self.failure is not None:
            raise self.failure
        return QueueDepth(waiting=2, waiting_tokens=9, pending=1, oldest_age=3.0)

    async def read(self, model: str, engine_ids: Sequence[str]) -> ModelSight:
        found = [EngineSight(age=0.1, snapshot=self.snapshots.get(one)) for one in engine_ids]
        return ModelSight(engines=tuple(found))

    async def watch(self, model: str, engine_ids: Sequence[str]) -> None:
        self.watched += engine_ids

    def feed(self) -> LiveFeed:
        return LiveFeed(
            LiveSources(
                models=self.models,
                engines=EngineDirectory(self),
                depths=self,
                store=self,
                clock=lambda: 1_700_000_000.0,
            )
        )


@pytest.fixture
def fleet(served: Models) -> Fleet:
    return Fleet(served)


async def latest(feed: LiveFeed, version: int = 0) -> tuple[int, LiveView]:
    with feed.watching("t"):
        return await feed.after(version)


async def test_nothing_is_read_while_no_client_watches(fleet: Fleet) -> None:
    feed = fleet.feed()
    assert fleet.reads == 0
    await latest(feed)
    assert fleet.reads == 1
    assert feed.tenants == []


async def test_each_watcher_starts_with_the_current_state(fleet: Fleet) -> None:
    feed = fleet.feed()
    _, before = await latest(feed)
    fleet.statuses = [engine_status(engine_id="e.2")]
    feed._sources.engines.forget()
    _, after = await latest(feed)
    names = [view.engines[0].status.engine_id for view in (before, after)]
    assert names == ["e.1", "e.2"]


async def test_only_engines_that_can_are_asked_for_snapshots(fleet: Fleet) -> None:
    fleet.statuses.append(engine_status(engine_id="older"))
    await latest(fleet.feed())
    assert fleet.watched == ["e.1"]


async def test_snapshots_for_an_earlier_watcher_are_not_shown(fleet: Fleet) -> None:
    fleet.snapshots["e.1"] = make_snapshot(make_sequence(), time=1_600_000_000.0)
    _, view = await latest(fleet.feed())
    assert view.engines[0].sight.snapshot is None
    fleet.snapshots["e.1"] = make_snapshot(make_sequence(), time=1_700_000_000.0)
    _, view = await latest(fleet.feed())
    assert view.engines[0].sight.snapshot is not None


@pytest.mark.parametrize("failure", [BackendUnavailable("redis: away"), ValueError("a bug")])
async def test_known_state_is_shown_while_redis_is_unreachable(
    fleet: Fleet, failure: Exception
) -> None:
    feed = fleet.feed()
    with feed.watching("t"):
        version, before = await feed.after(0)
        fleet.failure = failure
        version, view = await feed.after(version)
        assert (view.stale, view.engines) == (True, before.engines)
        fleet.failure = None
        _, view = await feed.after(version)
        assert not view.stale


async def test_only_a_part_of_a_large_fleet_is_shown(fleet: Fleet) -> None:
    fleet.statuses = [engine_status(engine_id=f"e.{n}") for n in range(MAX_ENGINES + 5)]
    _, view = await latest(fleet.feed())
    assert (len(view.engines), view.engines_left_out) == (MAX_ENGINES, 5)
