"""Adapters that are loaded and removed while an engine serves, compared with merged weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.core.errors import CheckpointError, ConfigError, RequestError
from headrace_engine.core.outputs import SequenceOutput
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_testing.adapter_scenes import ADAPTERS, GREEDY, LENGTH, AdapterScene
from headrace_testing.adapters import save_adapter
from headrace_testing.engines import engine_config, request

Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def scene(adapter_scene: AdapterScene) -> AdapterScene:
    return adapter_scene


class Served:
    """An engine without adapters of its settings, and the outputs of its requests so far."""

    def __init__(self, scene: AdapterScene, **options: object) -> None:
        usual = {"enable_lora": True, "max_loras": 2}
        config = engine_config(scene.checkpoint, **{**usual, **options})
        self.scene = scene
        self.runner = ModelRunner(config)
        self.engine = Engine(config, self.runner)
        self.outputs: dict[str, Tokens] = {}
        self.cached: dict[str, int] = {}

    def load(self, key: str, folder: Path) -> None:
        """As the engine's process does: `read_adapter` in another thread, then between two
        steps."""
        self.runner.install_adapter(key, self.runner.read_adapter(folder))

    def add(self, name: str, key: str | None, kind: str | None, index: int = 0) -> None:
        """Adds a request with a prompt of an adapter's paths, to be run with `key`."""
        path = self.scene.paths(kind)[index]
        self.engine.add_request(replace(request(name, path.prompt, GREEDY), lora=key))

    def step(self) -> None:
        for output in self.engine.step():
            self._note(output)

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def _note(self, output: SequenceOutput) -> None:
        name = output.request_id
        self.outputs[name] = self.outputs.get(name, ()) + tuple(output.token_ids)
        self.cached[name] = max(self.cached.get(name, 0), output.cached_tokens)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_adapters_are_loaded_and_removed_while_requests_run(
    scene: AdapterScene, async_scheduling: bool
) -> None:
    served = Served(scene, async_scheduling=async_scheduling)
    served.add("base", None, None)
    served.step()
    served.load("all", scene.folders["all"])
    served.add("all", "all", "all")
    served.step()
    served.load("some", scene.folders["some"])
    served.add("some", "some", "some")
    served.run()
    served.runner.remove_adapter("all")
    served.load("one", scene.folders["one"])
    served.add("one", "one", "one")
    served.add("some again", "some", "some", 1)
    served.run()

    expected = {"base": (None, 0), "all": ("all", 0), "some": ("some", 0), "one": ("one", 0)}
    expected["some again"] = ("some", 1)
    assert served.outputs == {
        name: scene.paths(kind)[index].output for name, (kind, index) in expected.items()
    }
    with pytest.raises(RequestError, match="'all' is not an adapter of this engine"):
        served.add("late", "all", "all")


def test_a_removed_adapter_gives_its_slot_to_others(scene: AdapterScene) -> None:
    served = Served(scene, max_loras=1)
    for name in ("all", "some", "all", "one"):
        served.load(name, scene.folders[name])
        served.add(name, name, name)
        served.run()
        served.runner.remove_adapter(name)
        assert served.outputs.pop(name) == scene.paths(name)[0].output
    adapters = served.runner.adapters
    assert adapters is not None and len(adapters) == 0


def test_a_new_version_of_an_adapter_shares_no_cached_prefix_with_the_old_one(
    scene: AdapterScene, tmp_path: Path
) -> None:
    """Both versions have the same prompt, of which the first one leaves blocks in the cache."""
    served = Served(scene)
    path = max(scene.paths("all"), key=lambda path: len(path.prompt))
    first = served.runner.read_adapter(scene.folders["all"])
    second = served.runner.read_adapter(
        save_adapter(tmp_path / "second", scene.checkpoint, **{**ADAPTERS["all"], "seed": 9})
    )
    for name, adapter in (("sql@1", first), ("sql@2", second), ("sql@1 again", None)):
        key = name.removesuffix(" again")
        if adapter is not None:
            served.runner.install_adapter(key, adapter)
        served.engine.add_request(replace(request(name, path.prompt, GREEDY), lora=key))
        served.run()

    assert first.digest != second.digest
    assert served.outputs["sql@1"] == path.output == served.outputs["sql@1 again"]
    assert served.outputs["sql@2"] != path.output
    assert served.cached["sql@2"] == 0 < served.cached["sql@1 again"]


def test_an_adapter_that_does_not_fit_is_refused_and_the_others_stay(
    scene: AdapterScene, tmp_path: Path
) -> None:
    served = Served(scene, max_lora_rank=8)
    served.load("all", scene.folders["all"])
    wide = save_adapter(tmp_path / "wide", scene.checkpoint, rank=16)
    strange = save_adapter(tmp_path / "strange", scene.checkpoint, modules=("embed_tokens",))
    with pytest.raises(ConfigError, match="rank 16 of .* is over max_lora_rank 8"):
        served.runner.read_adapter(wide)
    with pytest.raises(CheckpointError, match="embed_tokens cannot be served"):
        served.runner.read_adapter(strange)
    with pytest.raises(CheckpointError, match="is missing"):
        served.runner.read_adapter(tmp_path / "nothing")

    served.add("all", "all", "all")
    served.run()

    assert served.outputs["all"] == scene.paths("all")[0].output
    assert len(served.outputs["all"]) == LENGTH


def test_an_adapter_of_experts_needs_memory_that_is_taken_at_the_start(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    kinds: dict[str, dict[str, Any]] = {"a": {"modules": (), "experts": "joined", "rank": 3}}
    scene = AdapterScene(tmp_path, checkpoint("qwen2-moe"), kinds)
    with pytest.raises(CheckpointError, match="set lora_experts"):
        Served(scene).load("a", scene.folders["a"])
    served = Served(scene, lora_experts=True)
    served.load("a", scene.folders["a"])
    served.add("a", "a", "a")

    served.run()

    assert served.outputs["a"] == scene.paths("a")[0].output


def test_the_digest_depends_on_both_files(scene: AdapterScene, tmp_path: Path) -> None:
    runner = Served(scene).runner
    kinds: list[dict[str, Any]] = [{"seed": 1}, {"seed": 1}, {"seed": 2}, {"seed": 1, "alpha": 8.0}]
    digests = [
        runner.read_adapter(
            save_adapter(tmp_path / str(number), scene.checkpoint, **options)
        ).digest
        for number, options in enumerate(kinds)
    ]

    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
