"""Models that come and go with the registry, in virtual time."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.registry import Files, RegisteredModel, RegisteredModels, digest_of
from headrace_common.text.checkpoint import read_files
from headrace_common.text.tokenizer import Tokenizer
from headrace_gateway.errors import ApiError
from headrace_gateway.generation.admission import Admission, Limits
from headrace_gateway.models.discovery import LOOKUP_S, LOST_S, REFRESH_S, RETRY_S, Discovery
from headrace_gateway.models.loading import load_registered
from headrace_gateway.models.models import Models, ServedModel
from headrace_gateway.queue_client.engines import EngineDirectory
from headrace_testing.gateway import ScriptedEngine, engine_status
from headrace_testing.memory_queue.backend import MemoryBackend
from headrace_testing.memory_queue.registry import MemoryModelRegistry
from headrace_testing.waiting import eventually


class CountingRegistry(MemoryModelRegistry):
    """Counts reads."""

    def __init__(self, backend: MemoryBackend) -> None:
        super().__init__(backend)
        self.reads = 0

    async def models(self) -> RegisteredModels:
        self.reads += 1
        return await super().models()


class World:
    """A registry and a gateway's discovery of it. Time passes only in `later`."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.backend = MemoryBackend()
        self.registry = CountingRegistry(self.backend)
        self.now = 1000.0
        self.loads: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._ticks: asyncio.Queue[None] = asyncio.Queue()
        self._sleeping = asyncio.Event()
        self.discovery = Discovery(
            self.registry,
            self._load,
            ignored=("static",),
            clock=lambda: self.now,
            sleep=self._sleep,
        )
        self.models = Models({}, self.discovery)

    def names(self) -> tuple[str, ...]:
        return self.models.names

    async def _sleep(self, seconds: float) -> None:
        if seconds <= LOOKUP_S:
            self.now += seconds
            return
        assert seconds == REFRESH_S
        self._sleeping.set()
        await self._ticks.get()

    async def _load(self, model: RegisteredModel, files: Files) -> ServedModel:
        self.loads.append(model.name)
        await self.gate.wait()
        return load_registered(model, files, None)

    async def register(
        self,
        name: str,
        files: Files | None = None,
        *,
        max_model_len: int = 100,
        created: int = 5,
        adapters: tuple[str, ...] = (),
    ) -> None:
        contents = self.files if files is None else files
        entry = RegisteredModel(
            name=name,
            digest=digest_of(contents),
            max_model_len=max_model_len,
            created=created,
            adapters=adapters,
        )
        await self.registry.register(entry, contents)

    async def later(self, seconds: float = REFRESH_S) -> None:
        """Moves the time and runs a refresh, and the loads that it begins if nothing holds them."""
        self._sleeping.clear()
        self.now += seconds
        self._ticks.put_nowait(None)
        await self._sleeping.wait()
        await self.settle()

    async def settle(self) -> list[ServedModel]:
        """Waits until all loads that can end have ended; returns the models served meanwhile."""
        seen: list[ServedModel] = []
        for _ in range(20):
            await asyncio.sleep(0)
            seen += self.models
        return seen


@pytest.fixture
def files(checkpoint: Path) -> Files:
    return read_files(checkpoint).contents


@pytest.fixture
async def world(files: Files) -> AsyncIterator[World]:
    world = World(files)
    yield world
    await world.discovery.close()
    assert world.discovery.failed is None


def other(files: Files) -> Files:
    """Other files that can be loaded, too."""
    return {**files, "chat_template.jinja": b"other"}


BROKEN: dict[str, Files] = {
    "no tokenizer": {},
    "not a tokenizer": {"tokenizer.json": b"{}"},
    "a path as a name": {"../../tokenizer.json": b"{}"},
}


async def test_models_registered_before_the_start_are_served_at_once(world: World) -> None:
    await world.register("b")
    await world.register("a")
    await world.discovery.start()

    assert world.names() == ("a", "b")
    model = world.models.get("a")
    assert model.chat_template is not None
    assert (model.created, model.usual_model_len, model.max_model_len) == (5, 100, None)


async def test_models_come_and_go(world: World) -> None:
    await world.discovery.start()
    assert world.names() == ()
    await world.register("a")
    await world.later()
    assert world.names() == ("a",)
    await world.registry.remove("a", "")
    await world.later()
    assert world.names() == ()
    with pytest.raises(ApiError, match="none is registered yet") as refused:
        await world.models.find("a")
    assert refused.value.status == 404


async def test_a_requested_name_is_looked_up_at_once(world: World) -> None:
    await world.discovery.start()
    world.now += LOOKUP_S
    await world.register("a")

    assert (await world.models.find("a")).name == "a"


async def test_a_model_registered_right_after_a_look_is_found(world: World) -> None:
    await world.discovery.start()
    world.now += LOOKUP_S / 2
    await world.register("new")

    assert (await world.models.find("new")).name == "new"


async def test_unknown_names_cause_few_reads(world: World) -> None:
    await world.discovery.start()
    world.now += LOOKUP_S
    reads = world.registry.reads

    async def ask(number: int) -> None:
        with pytest.raises(ApiError):
            await world.models.find(f"made-up-{number}")

    await asyncio.gather(*map(ask, range(50)))

    assert world.registry.reads == reads + 1


async def test_a_request_waits_for_its_own_model_only(world: World) -> None:
    await world.discovery.start()
    world.gate.clear()
    await world.register("slow")
    await world.later()
    asking = asyncio.create_task(world.models.find("slow"))

    with pytest.raises(ApiError):
        await world.models.find("unknown")
    assert not asking.done()
    world.gate.set()
    assert (await asking).name == "slow"


async def test_without_a_name_the_only_model_is_meant(world: World) -> None:
    await world.discovery.start()
    with pytest.raises(ApiError) as none:
        await world.models.find(None)
    assert none.value.status == 503
    await world.register("a")
    world.now += LOOKUP_S
    assert (await world.models.find(None)).name == "a"

    await world.register("b")
    await world.later()
    with pytest.raises(ApiError, match="a, b") as several:
        await world.models.find(None)
    assert (several.value.status, several.value.code) == (400, "model_required")


async def test_the_first_model_is_listed_as_soon_as_it_is_registered(world: World) -> None:
    await world.discovery.start()
    assert await world.models.listed() == []
    await world.register("a")
    world.now += LOOKUP_S

    assert [model.name for model in await world.models.listed()] == ["a"]
    reads = world.registry.reads
    assert [model.name for model in await world.models.listed()] == ["a"]
    assert world.registry.reads == reads


async def test_no_empty_list_is_given_while_redis_is_unreachable(world: World) -> None:
    world.backend.available = False
    await world.discovery.start()

    with pytest.raises(BackendUnavailable):
        await world.models.listed()


async def test_the_same_files_are_loaded_once(world: World) -> None:
    for name in ("a", "b"):
        await world.register(name)
    await world.discovery.start()
    first = world.models.get("a").tokenizer
    await world.register("a", max_model_len=7, created=9)
    await world.later()

    assert len(world.loads) == 1
    assert world.models.get("a").tokenizer is first is world.models.get("b").tokenizer
    assert (world.models.get("a").usual_model_len, world.models.get("a").created) == (7, 9)
    assert world.models.get("b").usual_model_len == 100


async def test_new_files_take_over_once_they_are_loaded(world: World, files: Files) -> None:
    await world.register("a")
    await world.discovery.start()
    accepted = world.models.get("a")
    world.gate.clear()
    await world.register("a", other(files))
    await world.later()
    assert world.models.get("a") is accepted

    async def taken_over() -> bool:
        return world.models.get("a").tokenizer is not accepted.tokenizer

    world.gate.set()
    await eventually(taken_over)
    template = world.models.get("a").chat_template
    assert template is not None and template.source == "other"
    assert accepted.tokenizer.encode("Hi")


async def test_files_that_are_replaced_while_they_load_are_never_served(
    world: World, files: Files
) -> None:
    await world.discovery.start()
    world.gate.clear()
    await world.register("a")
    await world.later()
    await world.register("a", other(files))
    await world.later()
    world.gate.set()
    seen = await world.settle()

    assert seen and {model.chat_template and model.chat_template.source for model in seen} == {
        "other"
    }
    assert world.loads == ["a", "a"]


async def test_a_model_that_is_removed_while_it_loads_is_not_served(world: World) -> None:
    await world.discovery.start()
    world.gate.clear()
    await world.register("a")
    await world.later()
    await world.registry.remove("a", "")
    await world.later()
    world.gate.set()

    assert await world.settle() == []


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
async def test_a_broken_model_does_not_affect_others_and_is_retried_later(
    world: World, broken: Files, caplog: pytest.LogCaptureFixture
) -> None:
    await world.register("broken", broken)
    await world.register("good")
    with caplog.at_level(logging.ERROR):
        await world.discovery.start()
        await world.later()
        await world.later()
    assert world.names() == ("good",)
    assert world.loads.count("broken") == 1
    assert [record.model for record in caplog.records] == ["broken"]  # type: ignore[attr-defined]
    with pytest.raises(ApiError, match="cannot be loaded") as refused:
        await world.models.find("broken")
    assert (refused.value.status, refused.value.code) == (503, "model_unavailable")

    await world.later(RETRY_S)
    assert world.loads.count("broken") == 2
    await world.register("broken")
    await world.later()
    assert world.names() == ("broken", "good")


class Panic(BaseException):
    """An error like those that a native library raises for its own bugs."""


@pytest.mark.parametrize("error", [KeyError("x"), Panic("index out of bounds")])
async def test_an_error_of_one_model_does_not_affect_others(
    world: World, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> Tokenizer:
        raise error

    monkeypatch.setattr(Tokenizer, "from_files", fail)
    await world.register("broken")
    await world.discovery.start()
    monkeypatch.undo()
    await world.register("good")
    await world.later()

    assert world.discovery.failed is None
    assert world.names() == ("good",)


async def test_new_files_that_are_broken_leave_the_old_ones_served(world: World) -> None:
    await world.register("a")
    await world.discovery.start()
    await world.register("a", {"tokenizer.json": b"{}"})
    await world.later()

    assert world.models.get("a").tokenizer.encode("Hi")


async def test_known_models_are_served_while_redis_is_unreachable(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.register("a")
    await world.discovery.start()
    world.backend.available = False
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            await world.later()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1

    assert (await world.models.find("a")).name == "a"
    with pytest.raises(BackendUnavailable):  # it may exist, but the registry cannot be read
        await world.models.find("b")
    world.backend.available = True
    await world.register("b")
    world.now += LOOKUP_S
    assert (await world.models.find("b")).name == "b"


async def test_a_start_without_redis_continues_when_redis_answers(world: World) -> None:
    await world.register("a")
    world.backend.available = False
    await world.discovery.start()
    assert world.names() == ()
    world.backend.available = True
    await world.later()

    assert world.names() == ("a",)


async def test_models_that_redis_has_lost_stay_while_engines_may_register_again(
    world: World,
) -> None:
    await world.register("a")
    await world.register("b")
    await world.discovery.start()
    world.backend.wipe()
    await world.later()
    assert world.names() == ("a", "b")
    await world.register("a")
    await world.later()
    assert world.names() == ("a", "b")
    await world.later(LOST_S)

    assert world.names() == ("a",)
    assert world.loads == ["a"]
    await world.registry.remove("a", "")
    await world.later()
    assert world.names() == ()


async def test_models_of_the_settings_take_precedence(world: World, files: Files) -> None:
    await world.register("a")
    await world.discovery.start()
    static = replace(world.models.get("a"), name="static", created=1)
    models = Models({"static": static}, world.discovery)
    await world.register("static", other(files))
    await world.later()

    assert models.names == ("static", "a")
    assert (await models.find("static")).created == 1
    assert world.loads == ["a"]


async def test_adapters_are_listed_as_models_and_served_by_their_base_models_engines(
    world: World,
) -> None:
    await world.register("base", adapters=("sql", "chat"))
    await world.discovery.start()

    sql = world.models.get("sql")
    assert (sql.name, sql.parent, sql.queue, sql.lora) == ("sql", "base", "base", "sql")
    base = world.models.get(None)
    assert (base.name, base.parent, base.queue, base.lora) == ("base", None, "base", None)
    assert world.names() == ("base", "sql", "chat")
    assert world.models.queues == ("base",)
    assert world.loads == ["base"]

    await world.register("base", adapters=("chat",))
    await world.later()
    assert world.names() == ("base", "chat")


async def test_a_requested_adapter_is_looked_up_at_once(world: World) -> None:
    await world.discovery.start()
    world.now += LOOKUP_S
    await world.register("base", adapters=("sql",))

    assert (await world.models.find("sql")).parent == "base"


async def test_a_key_may_be_for_an_adapter_and_not_for_its_model(world: World) -> None:
    await world.register("base", adapters=("sql", "chat"))
    await world.discovery.start()
    allowed = world.models.only(lambda name: name == "sql")

    assert allowed.names == ("sql",)
    assert (await allowed.find(None)).name == "sql"
    for name in ("base", "chat"):
        with pytest.raises(ApiError, match="is not served here"):
            await allowed.find(name)


async def test_models_of_the_settings_have_the_adapters_of_their_engines(world: World) -> None:
    await world.register("plain", adapters=("plain-sql",))
    await world.register("static", adapters=("sql", "plain"))
    await world.discovery.start()
    static = world.models.get("plain")
    models = Models({"static": replace(static, name="static")}, world.discovery)

    assert (await models.find("sql")).queue == "static"
    # A model takes precedence over an adapter with its name.
    assert models.get("plain").parent is None
    assert models.names == ("static", "plain", "plain-sql", "sql")
    world.backend.wipe()
    await world.later()
    assert (await models.find("sql")).queue == "static"
    await world.later(LOST_S)
    assert list(models.names) == ["static"]


async def test_the_registered_length_is_used_while_no_engine_reports_another(world: World) -> None:
    await world.register("a", max_model_len=300)
    await world.discovery.start()
    model = world.models.get("a")
    queue = ScriptedEngine(model.tokenizer)
    engines = EngineDirectory(queue)
    limits = Limits(default_deadline=1, max_deadline=1, max_choices=1)
    admission = Admission(queue, engines, limits)

    for statuses, length in (([], 300), ([engine_status(model="a", max_model_len=400)], 400)):
        queue.statuses = statuses
        engines.forget()
        assert await admission.context(model) == length
    assert await admission.context(replace(model, max_model_len=50)) == 50
    queue.unreachable = BackendUnavailable("gone")
    engines.forget()
    assert await admission.known_context(model) == 300
