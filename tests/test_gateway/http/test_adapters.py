"""The routes that load and unload adapters, and what gateways serve meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_common.errors import BackendUnfit
from headrace_common.protocol.adapter_control import AdapterControl
from headrace_common.protocol.adapters import Adapter, AdapterReport, new_adapter
from headrace_gateway.errors import ApiError
from headrace_gateway.limits.api_keys import KeyFile
from headrace_gateway.models.discovery import Discovery
from headrace_gateway.models.loaded_adapters import LOST_S, LoadedAdapters
from headrace_testing.api_keys import KeyBook
from headrace_testing.gateway import MODEL, Gateway, engine_status, serve
from headrace_testing.memory_queue.adapters import MemoryAdapterSets
from headrace_testing.memory_queue.backend import MemoryBackend
from headrace_testing.memory_queue.registry import MemoryModelRegistry

ONE, TWO = "1" * 32, "2" * 32
SQL = {"lora_name": "sql", "lora_path": "/adapters/sql"}


class Engines:
    """Two engines that load every adapter with `digest`, or refuse it for `reason`."""

    def __init__(self, sets: MemoryAdapterSets) -> None:
        self._sets = sets
        self.digest, self.reason = ONE, ""
        self.names: tuple[str, ...] = ("a", "b")
        self._loaded: dict[str, str] = {}

    async def engines(self, model: str) -> Any:
        known = await self._sets.read(model)
        fresh = {each.adapter_id for each in known.loading} - self._loaded.keys()
        refused = dict.fromkeys(fresh, self.reason) if self.reason else {}
        self._loaded |= {} if self.reason else dict.fromkeys(fresh, self.digest)
        for name in self.names:
            await self._sets.report(model, name, AdapterReport(dict(self._loaded), refused))
        return [replace(engine_status(), engine_id=name, model=model) for name in self.names]


class World:
    """A gateway's application with a discovery over a queue in memory."""

    def __init__(self) -> None:
        self.backend, self.now = MemoryBackend(), 1000.0
        self.sets = MemoryAdapterSets(self.backend)
        self.engines = Engines(self.sets)
        self.control = AdapterControl(self.sets, self.engines.engines, lambda: self.now, kept=50.0)
        self.loaded = LoadedAdapters(
            self.sets, self.control, lambda: self.now, clock=lambda: self.now
        )
        unused: Any = None
        self.discovery = Discovery(
            MemoryModelRegistry(self.backend),
            unused,
            ignored=(MODEL,),
            loaded_adapters=self.loaded,
            sleep=lambda _seconds: asyncio.sleep(0),
        )

    def serve(self, checkpoint: Path, **options: Any) -> Any:
        usual = {"allow_runtime_lora_updating": True, "lora_load_timeout": 30.0}
        return serve(
            checkpoint,
            discovered=self.discovery,
            adapter_control=self.control,
            **{**usual, **options},
        )


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def gateway(world: World, checkpoint: Path) -> AsyncIterator[Gateway]:
    async with world.serve(checkpoint) as running:
        yield running


async def change(gateway: Gateway, what: str, **body: Any) -> httpx.Response:
    return await gateway.http.post(f"/v1/{what}_lora_adapter", json=body)


async def names(gateway: Gateway) -> list[str]:
    return [each["id"] for each in (await gateway.http.get("/v1/models")).json()["data"]]


def error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def ask(gateway: Gateway, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "x", "max_tokens": 2}
    return await gateway.http.post("/v1/completions", json=body)


async def test_an_adapter_is_served_from_its_load_to_its_unload(gateway: Gateway) -> None:
    answer = await change(gateway, "load", **SQL)

    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    assert await names(gateway) == [MODEL, "sql"]
    assert (await ask(gateway, "sql")).status_code == 200
    (request,) = gateway.engine.submitted
    assert (request.model, request.lora, request.lora_version) == (MODEL, "sql", ONE)
    answer = await change(gateway, "unload", lora_name="sql")
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'sql' removed successfully.",
    )
    assert await names(gateway) == [MODEL]
    assert error(await ask(gateway, "sql")) == (404, "model_not_found")


async def test_a_replaced_adapter_is_served_in_its_new_version(
    gateway: Gateway, world: World
) -> None:
    await change(gateway, "load", **SQL)
    again = await change(gateway, "load", **SQL)
    assert error(again) == (400, "adapter_refused")
    assert "already been loaded" in again.text
    world.engines.digest = TWO

    assert (await change(gateway, "load", **SQL, load_inplace=True)).status_code == 200

    await ask(gateway, "sql")
    assert [each.lora_version for each in gateway.engine.submitted] == [TWO]


async def test_an_adapter_that_engines_refuse_changes_nothing(
    gateway: Gateway, world: World
) -> None:
    await change(gateway, "load", **SQL)
    world.engines.reason = "rank 64 is over max_lora_rank 16"

    refused = await change(gateway, "load", **SQL, load_inplace=True)
    other = await change(gateway, "load", **{**SQL, "lora_name": "other"})

    for answer in (refused, other):
        assert error(answer) == (400, "adapter_refused")
        assert "rank 64 is over max_lora_rank 16" in answer.text
    assert await names(gateway) == [MODEL, "sql"]
    await ask(gateway, "sql")
    assert [each.lora_version for each in gateway.engine.submitted] == [ONE]


async def test_without_an_engine_the_call_ends_at_its_timeout(
    world: World, checkpoint: Path
) -> None:
    world.engines.names = ()
    async with world.serve(checkpoint, lora_load_timeout=0.001) as gateway:
        answer = await change(gateway, "load", **SQL)

        assert error(answer) == (400, "adapter_refused")
        assert "start one that loads adapters" in answer.text
        assert await names(gateway) == [MODEL]


async def test_an_adapter_that_another_gateway_has_loaded_is_found(
    gateway: Gateway, world: World, checkpoint: Path
) -> None:
    async with World.serve(world, checkpoint) as other:
        await change(other, "load", **SQL)

    assert (await ask(gateway, "sql")).status_code == 200


async def test_the_answers_of_an_unloaded_adapter_can_still_be_read(
    gateway: Gateway, world: World
) -> None:
    """Stored requests name the adapter and its model."""
    await change(gateway, "load", **SQL)
    await change(gateway, "unload", lora_name="sql")
    models = gateway.app.state.services.models

    former = await models.find_former("sql", MODEL)

    assert (former.name, former.queue) == ("sql", MODEL)
    with pytest.raises(ApiError, match="is not served here"):
        await models.find_former("other", "other")


async def test_names_that_are_taken_or_unknown_are_refused(gateway: Gateway) -> None:
    taken = await change(gateway, "load", **{**SQL, "lora_name": MODEL})
    assert taken.status_code == 400 and "is taken" in taken.text
    assert error(await change(gateway, "unload", lora_name="sql")) == (404, "adapter_not_found")
    assert error(await change(gateway, "unload", lora_name=MODEL)) == (404, "adapter_not_found")
    unknown = await change(gateway, "load", **SQL, base_model_name="other")
    assert error(unknown) == (404, "model_not_found")
    await change(gateway, "load", **SQL)
    nested = await change(gateway, "load", lora_name="x", lora_path="/x", base_model_name="sql")
    assert nested.status_code == 400 and "name its model" in nested.text


async def test_an_adapter_of_the_settings_stays(world: World, checkpoint: Path) -> None:
    async with world.serve(checkpoint, lora_modules=["fixed"]) as gateway:
        for answer in (
            await change(gateway, "load", **{**SQL, "lora_name": "fixed"}),
            await change(gateway, "unload", lora_name="fixed"),
        ):
            assert answer.status_code == 400
        assert await names(gateway) == [MODEL, "fixed"]


async def test_adapters_do_not_change_unless_the_setting_allows_it(
    world: World, checkpoint: Path
) -> None:
    async with world.serve(checkpoint, allow_runtime_lora_updating=False) as gateway:
        for answer in (
            await change(gateway, "load", **SQL),
            await change(gateway, "unload", lora_name="sql"),
        ):
            assert error(answer) == (403, "not_allowed")
    assert (await world.sets.read(MODEL)).adapters == ()


async def test_only_admin_keys_may_change_adapters(
    world: World, checkpoint: Path, tmp_path: Path
) -> None:
    book = KeyBook(tmp_path / "keys.yaml")
    book.add("alice")
    book.add("ops", admin=True)
    async with world.serve(checkpoint, keys=KeyFile(book.path)) as gateway:
        gateway.http.headers.update(book.headers("alice"))
        assert error(await change(gateway, "load", **SQL)) == (403, "not_allowed")
        gateway.http.headers.update(book.headers("ops"))
        assert (await change(gateway, "load", **SQL)).status_code == 200

    (adapter,) = (await world.sets.read(MODEL)).adapters
    assert adapter.by == "ops"


async def test_an_adapter_keeps_its_version_while_redis_has_lost_the_registry(
    gateway: Gateway, world: World
) -> None:
    world.backend.models_store = "before"
    await change(gateway, "load", **SQL)
    world.backend.wipe()
    await world.discovery.ensure_loaded(None)

    assert (await ask(gateway, "sql")).status_code == 200
    assert [each.lora_version for each in gateway.engine.submitted] == [ONE]


async def test_adapters_stay_known_for_a_while_after_redis_has_lost_them(world: World) -> None:
    adapters = world.loaded
    await world.control.load(MODEL, _adapter(), replaces=False, patience=30)
    await adapters.refresh()
    assert [*adapters.by_name] == ["sql"]
    world.backend.wipe()
    await adapters.refresh()
    assert [*adapters.by_name] == ["sql"]

    world.now += LOST_S
    await adapters.refresh()

    assert adapters.by_name == {}


async def test_models_are_served_if_the_redis_user_may_not_read_adapters(
    gateway: Gateway, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forbidden() -> dict[str, str]:
        raise BackendUnfit("redis: this user has no permission")

    monkeypatch.setattr(world.sets, "versions", forbidden)
    await world.discovery.ensure_loaded(None)

    assert await names(gateway) == [MODEL]


async def test_a_gateway_forgets_retired_adapters_in_time(world: World) -> None:
    await world.control.load(MODEL, _adapter(), replaces=False, patience=30)
    await world.control.unload(MODEL, "sql")
    await world.loaded.refresh()
    assert len((await world.sets.read(MODEL)).adapters) == 1

    world.now += 50.0
    await world.loaded.refresh()

    assert (await world.sets.read(MODEL)).adapters == ()


def _adapter() -> Adapter:
    return new_adapter("sql", "/adapters/sql", "test", 1000.0)
