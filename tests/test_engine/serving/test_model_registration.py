"""The registration of an engine's model for gateways, and its renewal, in virtual time."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_common.errors import SettingsError
from headrace_common.protocol.registry import Files, RegisteredModel
from headrace_common.text.chat_template import ChatTemplateError
from headrace_common.text.checkpoint import (
    CHAT_TEMPLATE_FILE,
    DEMO_MODEL,
    CheckpointFiles,
    demo_folder,
)
from headrace_common.text.errors import TokenizerError
from headrace_engine.serving.model_registration import (
    CHECK_S,
    RETRY_S,
    ModelRegistration,
    ModelSource,
)
from headrace_engine.serving.settings import EngineSettings
from headrace_testing.memory_queue.backend import MemoryBackend
from headrace_testing.memory_queue.registry import MemoryModelRegistry
from headrace_testing.tokenizers import byte_level_tokenizer, write_checkpoint

NAME = "tiny"


class CountingRegistry(MemoryModelRegistry):
    def __init__(self, backend: MemoryBackend) -> None:
        super().__init__(backend)
        self.writes = 0

    async def register(self, model: RegisteredModel, files: Files) -> None:
        self.writes += 1
        await super().register(model, files)


class World:
    """A registry and an engine's registration. A test ends the registration's sleeps."""

    def __init__(self, folder: Path) -> None:
        self.backend = MemoryBackend()
        self.registry = CountingRegistry(self.backend)
        self.source = ModelSource(model=str(folder))
        self.now = 5_000.0
        self.slept: list[float] = []
        self.draining = False
        self._ticks: asyncio.Queue[None] = asyncio.Queue()
        self._sleeping = asyncio.Event()
        self.registration = self.engine()
        self.task: asyncio.Task[None] | None = None

    def engine(
        self,
        owner: str = "ns/tiny",
        max_model_len: int = 64,
        files: CheckpointFiles | None = None,
    ) -> ModelRegistration:
        return ModelRegistration(
            self.registry,
            self.source,
            name=NAME,
            max_model_len=max_model_len,
            owner=owner,
            files=files,
            clock=lambda: self.now,
            sleep=self._sleep,
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._sleeping.set()
        await self._ticks.get()

    async def tick(self) -> None:
        """Runs the next check of the registry."""
        if self.task is None:
            self.task = asyncio.create_task(self.registration.keep(lambda: self.draining))
            await self._sleeping.wait()
        self._sleeping.clear()
        self._ticks.put_nowait(None)
        await self._sleeping.wait()

    async def entry(self) -> RegisteredModel | None:
        return (await self.registry.models()).get(NAME)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", byte_level_tokenizer(), config={})


@pytest.fixture
async def world(folder: Path) -> AsyncIterator[World]:
    world = World(folder)
    yield world
    if world.task is not None:
        assert not world.task.done()
        world.task.cancel()
        await asyncio.gather(world.task, return_exceptions=True)


async def test_only_the_files_that_a_gateway_needs_are_registered(
    world: World, folder: Path
) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.model").write_bytes(b"unused")
    await world.registration.announce()

    entry = await world.entry()
    assert entry is not None
    assert (entry.owner, entry.max_model_len, entry.created) == ("ns/tiny", 64, 5_000)
    files = await world.registry.files(entry)
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json", "config.json"}
    assert files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()


async def test_files_that_were_read_before_the_weights_are_not_read_again(
    world: World, folder: Path
) -> None:
    read = world.source.read().files
    content = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").unlink()
    engine = world.registration = world.engine(files=read)
    await engine.announce()
    first = await world.entry()
    assert first is not None
    assert (await world.registry.files(first))["tokenizer.json"] == content

    (folder / "tokenizer.json").write_bytes(content + b" ")
    await world.registry.remove(NAME, first.owner)
    await world.tick()
    again = await world.entry()

    assert again is not None and again.digest != first.digest


async def test_a_chat_template_in_the_settings_replaces_that_of_the_model(
    world: World, tmp_path: Path
) -> None:
    template = tmp_path / "template"
    template.write_text("mine")
    world.source = replace(world.source, chat_template=str(template))
    await world.engine().announce()

    entry = await world.entry()
    assert entry is not None
    assert (await world.registry.files(entry))[CHAT_TEMPLATE_FILE] == b"mine"


async def test_a_second_engine_of_the_model_writes_nothing(world: World) -> None:
    await world.registration.announce()
    world.now += 100
    await world.engine().announce()

    assert world.registry.writes == 1


async def test_an_engine_with_other_values_replaces_the_entry(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.registration.announce()
    world.now += 100
    await world.engine(max_model_len=32).announce()
    entry = await world.entry()
    assert entry is not None and (entry.max_model_len, entry.created) == (32, 5_000)

    with caplog.at_level(logging.WARNING):
        await world.engine(owner="ns/other").announce()
    entry = await world.entry()
    assert entry is not None and (entry.owner, entry.created) == ("ns/other", 5_100)
    assert "another owner" in caplog.text


async def test_an_entry_that_redis_lost_is_registered_again(world: World) -> None:
    await world.registration.announce()
    await world.tick()
    assert world.registry.writes == 1
    world.backend.wipe()
    await world.tick()

    assert await world.entry() is not None
    assert set(world.slept) == {CHECK_S}


async def test_an_entry_of_another_engine_is_left_alone(world: World) -> None:
    await world.registration.announce()
    await world.engine(owner="ns/newer").announce()
    await world.tick()

    entry = await world.entry()
    assert entry is not None and entry.owner == "ns/newer"


async def test_a_draining_engine_registers_nothing(world: World) -> None:
    await world.registration.announce()
    world.backend.wipe()
    world.draining = True
    await world.tick()

    assert await world.entry() is None


async def test_a_model_is_registered_as_soon_as_redis_is_back(world: World) -> None:
    world.backend.available = False
    await world.registration.announce()
    await world.tick()
    world.backend.available = True
    await world.tick()

    assert await world.entry() is not None
    assert world.slept == [RETRY_S, RETRY_S, CHECK_S]


async def test_files_that_are_gone_later_do_not_end_the_engine(world: World, folder: Path) -> None:
    await world.registration.announce()
    world.backend.wipe()
    content = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").unlink()
    await world.tick()
    assert await world.entry() is None
    (folder / "tokenizer.json").write_bytes(content)
    await world.tick()

    assert await world.entry() is not None


def test_files_that_no_gateway_can_load_are_refused_at_the_start(
    folder: Path, tmp_path: Path
) -> None:
    source = ModelSource(model=str(folder))
    source.read()
    template = tmp_path / "template"
    with pytest.raises(SettingsError, match=f"chat_template: .*{template.name}"):
        replace(source, chat_template=str(template)).read()
    template.write_text("{% if %}")
    with pytest.raises(ChatTemplateError, match="line 1"):
        replace(source, chat_template=str(template)).read()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="tokenizer.json is missing"):
        source.read()


def test_the_demo_model_has_a_name() -> None:
    settings = EngineSettings(model=DEMO_MODEL)

    assert settings.name == DEMO_MODEL
    assert settings.engine_config().model == str(demo_folder())
    ModelSource(model=settings.model).read()
