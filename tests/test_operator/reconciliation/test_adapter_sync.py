"""The adapters of a ModelService in the queue's set, and what its status says of them."""

from typing import Any

import pytest

from headrace_common.protocol.adapter_control import AdapterControl
from headrace_common.protocol.adapters import AdapterReport, AdapterState, new_adapter
from headrace_operator.reconciliation.adapter_sync import AdapterStatus, AdapterSync
from headrace_testing.memory_queue.adapters import MemoryAdapterSets
from headrace_testing.model_services import service
from headrace_testing.operators import Directory, Scene, engine_status

MODEL = "qwen"
DIGEST = "1" * 32


class World:
    """A sync over a queue in memory, with engines that report what a test says."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.sets = MemoryAdapterSets(scene.backend)
        self.control = AdapterControl(self.sets, Directory(scene).engines, scene.clock, kept=10.0)
        self.adapters = AdapterSync(self.control, self._measure)

    async def _measure(self, model: str) -> None:
        self.scene.backend.check()

    async def sync(self, *adapters: tuple[str, str], **spec: Any) -> Any:
        named = [{"name": name, "path": path} for name, path in adapters]
        return await self.adapters.sync(service(lora={"adapters": named}, **spec))

    async def report(
        self, pod: str, loaded: tuple[str, ...], refused: tuple[str, ...] = ()
    ) -> None:
        """An engine has the newest version of each adapter in `loaded`, and refuses others."""
        ids = {each.name: each.adapter_id for each in (await self.sets.read(MODEL)).adapters}
        status = engine_status(pod)
        self.scene.statuses = [
            *(each for each in self.scene.statuses if each.engine_id != status.engine_id),
            status,
        ]
        report = AdapterReport(
            {ids[name]: DIGEST for name in loaded}, {ids[name]: "too wide" for name in refused}
        )
        await self.sets.report(MODEL, status.engine_id, report)

    async def states(self) -> list[tuple[str, str, str]]:
        known = await self.sets.read(MODEL)
        return [(each.name, each.path, each.state.value) for each in known.adapters]


@pytest.fixture
def world(scene: Scene) -> World:
    return World(scene)


async def test_an_adapter_of_the_spec_is_served_once_an_engine_has_it(world: World) -> None:
    assert await world.sync(("sql", "/model/sql")) == (AdapterStatus("sql", False, 0),)
    await world.report("a", ("sql",))
    await world.report("b", (), ("sql",))

    assert await world.sync(("sql", "/model/sql")) == (AdapterStatus("sql", True, 1, "too wide"),)
    assert await world.states() == [("sql", "/model/sql", "ready")]


async def test_an_unchanged_spec_changes_nothing(world: World) -> None:
    await world.sync(("sql", "/model/sql"))
    before = await world.sets.read(MODEL)

    await world.sync(("sql", "/model/sql"))

    assert await world.sets.read(MODEL) == before


async def test_an_adapter_that_left_the_spec_is_retired(world: World) -> None:
    await world.sync(("sql", "/model/sql"), ("tone", "/model/tone"), ("new", "/model/new"))
    await world.report("a", ("sql", "tone"))
    await world.sync(("sql", "/model/sql"), ("tone", "/model/tone"), ("new", "/model/new"))

    await world.sync(("sql", "/model/sql"))

    assert await world.states() == [
        ("sql", "/model/sql", "ready"),
        ("tone", "/model/tone", "retired"),
    ]
    assert await world.sync() == ()
    assert {state for _, _, state in await world.states()} == {"retired"}


async def test_a_new_folder_replaces_the_old_one_only_if_an_engine_takes_it(world: World) -> None:
    await world.sync(("sql", "/model/1"))
    await world.report("a", ("sql",))
    await world.sync(("sql", "/model/1"))
    assert await world.sync(("sql", "/model/2")) == (AdapterStatus("sql", True, 0),)
    await world.report("a", (), ("sql",))
    assert await world.sync(("sql", "/model/2")) == (AdapterStatus("sql", True, 0, "too wide"),)
    assert await world.states() == [("sql", "/model/1", "ready"), ("sql", "/model/2", "loading")]

    assert await world.sync(("sql", "/model/1")) == (AdapterStatus("sql", True, 0),)
    assert await world.states() == [("sql", "/model/1", "ready")]


async def test_adapters_that_others_have_loaded_stay(world: World) -> None:
    await world.sync(("sql", "/model/sql"))
    known = await world.sets.read(MODEL)
    other = known.added(new_adapter("tone", "/model/tone", "ops", 1.0))
    await world.sets.replace(MODEL, known, other)

    await world.sync()

    assert [name for name, _, _ in await world.states()] == ["tone"]


async def test_the_adapters_of_a_deleted_model_service_are_retired(world: World) -> None:
    await world.sync(("sql", "/model/sql"))
    await world.report("a", ("sql",))
    await world.sync(("sql", "/model/sql"))

    await world.adapters.remove(MODEL, service().owner)

    assert await world.states() == [("sql", "/model/sql", AdapterState.RETIRED.value)]


async def test_the_states_are_unknown_without_redis(world: World, scene: Scene) -> None:
    scene.queue_down = True

    assert await world.sync(("sql", "/model/sql")) is None


async def test_a_queue_of_its_own_is_not_the_operators_to_change(world: World) -> None:
    secret = {"urlSecret": {"name": "queue", "key": "url"}}

    assert await world.sync(("sql", "/model/sql"), queue=secret) == ()
    assert await world.states() == []
