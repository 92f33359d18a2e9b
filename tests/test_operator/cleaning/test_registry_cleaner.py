"""The removal of models from the registry, over the API server and the queue in memory."""

from collections.abc import AsyncIterator

import pytest
from kubernetes.aio.client import Configuration

from headrace_operator import names
from headrace_operator.cleaning.registry_cleaner import WAIT, RegistryCleaner
from headrace_operator.cluster.cluster import Cluster
from headrace_testing.kubernetes import NAMESPACE, User
from headrace_testing.model_services import HUB, body
from headrace_testing.operators import Directory, Scene, engine_status, register_model

OWNER = f"{NAMESPACE}/qwen"


@pytest.fixture
async def cleaner(user: User, scene: Scene) -> AsyncIterator[RegistryCleaner]:
    cluster = Cluster(Configuration(host=user.url))
    yield RegistryCleaner(cluster, scene.registry, Directory(scene), NAMESPACE, scene.clock)
    await cluster.close()


async def look_twice(cleaner: RegistryCleaner, scene: Scene) -> set[str]:
    """Runs the cleaner's check twice; returns the models that remain."""
    await cleaner.run_once()
    scene.now += WAIT
    await cleaner.run_once()
    return set(scene.backend.models)


async def test_an_entry_without_its_model_service_is_removed_at_the_second_check(
    cleaner: RegistryCleaner, scene: Scene
) -> None:
    await register_model(scene, "qwen", OWNER)
    await cleaner.run_once()
    scene.now += WAIT - 1
    await cleaner.run_once()
    assert set(scene.backend.models) == {"qwen"}
    scene.now += 1
    await cleaner.run_once()
    assert not scene.backend.models


async def test_an_entry_that_is_claimed_stays(
    user: User, cleaner: RegistryCleaner, scene: Scene
) -> None:
    await user.create(body(model={**HUB, "servedName": "chat"}))
    await register_model(scene, "chat", OWNER)
    assert await look_twice(cleaner, scene) == {"chat"}


async def test_an_entry_under_a_former_name_is_removed(
    user: User, cleaner: RegistryCleaner, scene: Scene
) -> None:
    await user.create(body(model={**HUB, "servedName": "new"}))
    for name in ("old", "new"):
        await register_model(scene, name, OWNER)
    assert await look_twice(cleaner, scene) == {"new"}


@pytest.mark.parametrize("owner", ["", "elsewhere/qwen", "qwen"])
async def test_entries_of_others_are_not_touched(
    cleaner: RegistryCleaner, scene: Scene, owner: str
) -> None:
    await register_model(scene, "qwen", owner)
    assert await look_twice(cleaner, scene) == {"qwen"}


async def test_an_entry_that_came_back_waits_again(
    user: User, cleaner: RegistryCleaner, scene: Scene
) -> None:
    await register_model(scene, "qwen", OWNER)
    await cleaner.run_once()
    scene.now += WAIT
    await user.create(body())
    await cleaner.run_once()
    await user.delete(names.API_VERSION, names.PLURAL, "qwen")
    scene.now += WAIT
    await cleaner.run_once()
    assert set(scene.backend.models) == {"qwen"}
    scene.now += WAIT
    await cleaner.run_once()
    assert not scene.backend.models


async def test_an_entry_stays_until_its_last_engine_drains(
    cleaner: RegistryCleaner, scene: Scene
) -> None:
    await register_model(scene, "qwen", OWNER)
    scene.statuses = [engine_status("left-over")]
    assert await look_twice(cleaner, scene) == {"qwen"}
    scene.statuses = [engine_status("left-over", draining=True)]
    assert await look_twice(cleaner, scene) == set()


async def test_an_unreachable_queue_only_delays_the_cleaning(
    user: User, cleaner: RegistryCleaner, scene: Scene
) -> None:
    await register_model(scene, "qwen", OWNER)
    scene.queue_down = True
    await cleaner.run_once()
    scene.queue_down = False
    assert await look_twice(cleaner, scene) == set()
