"""Adapters from a store that speaks S3; the store checks signatures."""

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_engine.core.errors import CheckpointError
from headrace_engine.engine.engine import Engine
from headrace_engine.lora.object_storage import FETCH_S, MAX_CONFIG_BYTES, fetched
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_testing.adapter_scenes import GREEDY, AdapterScene
from headrace_testing.engines import engine_config, request
from headrace_testing.fake_s3 import FakeS3

CONFIG, WEIGHTS = b"{}", bytes(range(256)) * 10_000
OBJECTS = {
    "adapters/sql/v2/adapter_config.json": CONFIG,
    "adapters/sql/v2/adapter_model.safetensors": WEIGHTS,
    "adapters/sql/v2/optimizer.pt": b"x",
    "adapters/half/adapter_config.json": CONFIG,
    "adapters/large/adapter_config.json": b" " * (MAX_CONFIG_BYTES + 1),
}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with FakeS3(OBJECTS) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


def refusal(uri: str, room: int = 2**30, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught, fetched(uri, room, **options):
        pass
    return str(caught.value)


def test_an_adapter_has_two_files_and_stays_for_a_block(store: FakeS3) -> None:
    with fetched("s3://adapters/sql/v2/", len(WEIGHTS)) as folder:
        found = {file.name: file.read_bytes() for file in folder.iterdir()}
        assert found == {"adapter_config.json": CONFIG, "adapter_model.safetensors": WEIGHTS}
    assert not folder.exists()
    assert len(store.fetched) == 2


def test_a_download_that_breaks_off_is_continued(store: FakeS3) -> None:
    store.cut_once = "adapters/sql/v2/adapter_model.safetensors"
    with fetched("s3://adapters/sql/v2", 2**30) as folder:
        assert (folder / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert store.fetched.count("adapters/sql/v2/adapter_model.safetensors") == 2


@pytest.mark.parametrize(
    ("uri", "room", "reason"),
    [
        ("s3://adapters", 2**30, "'s3://adapters' is not an adapter's place: give s3://bucket/"),
        ("s3://other/sql/v2", 2**30, "s3://other/sql/v2/adapter_config.json does not exist: an "),
        ("s3://adapters/half", 2**30, "half/adapter_model.safetensors does not exist"),
        ("s3://adapters/x/../sql/v2", 2**30, "cannot be fetched: Could not parse path"),
        ("s3://adapters/sql/v2", 99, "has 2560000 bytes, but only 99 are free"),
        ("s3://adapters/large", 2**30, "adapter_config.json has 1048577 bytes, but only 1048576"),
    ],
)
def test_what_cannot_be_fetched_is_refused_by_name(
    store: FakeS3, uri: str, room: int, reason: str
) -> None:
    assert reason in refusal(uri, room)


def test_wrong_credentials_are_named(store: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    assert "may not be read with the engine's credentials" in refusal("s3://adapters/sql/v2")


def test_a_download_has_an_end(store: FakeS3) -> None:
    times = iter([0.0, 1.0])
    reason = refusal("s3://adapters/sql/v2", clock=lambda: next(times, FETCH_S))
    assert "was not fetched within 600 s" in reason


def test_a_full_disk_is_named(store: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1))
    assert "has 2 bytes, but" in refusal("s3://adapters/sql/v2")


def test_engines_serve_adapters_whose_folders_are_gone(
    adapter_scene: AdapterScene, store: FakeS3
) -> None:
    """One of the settings and one that is loaded later, each read again from its open file."""
    store.objects = {
        f"adapters/{name}/{file.name}": file.read_bytes()
        for name in ("all", "some")
        for file in adapter_scene.folders[name].iterdir()
    }
    options = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1}
    modules = {"all": "s3://adapters/all"}
    config = engine_config(adapter_scene.checkpoint, lora_modules=modules, **options)
    runner = ModelRunner(config)
    with fetched("s3://adapters/some", 2**30) as folder:
        runner.install_adapter("some", runner.read_adapter(folder))
    engine = Engine(config, runner)

    for index, name in enumerate(("all", "some", "all", "some")):
        path = adapter_scene.paths(name, 4)[index]
        engine.add_request(replace(request(str(index), path.prompt, GREEDY), lora=name))
        tokens: list[int] = []
        while engine.has_work:
            tokens += [token for output in engine.step() for token in output.token_ids]
        assert tuple(tokens) == path.output
