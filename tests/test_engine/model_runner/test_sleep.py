"""An engine that has slept goes on with the same greedy tokens, and gives memory back meanwhile.

A real model on the CPU.
"""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.config import SleepLevel
from headrace_engine.core.errors import CheckpointError, ConfigError
from headrace_engine.core.speculative_config import SpeculativeConfig
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.scheduler.copy_costs import CopyCosts
from headrace_testing.checkpoints import save_checkpoint
from headrace_testing.engines import Output, engine_config, greedy, make_runner, request, run

CheckpointMaker = Callable[[str], Path]
LEVELS: tuple[SleepLevel, ...] = (1, 2)
PROMPTS = [[(3 * number + index) % 90 + 4 for index in range(9 + number)] for number in range(5)]


@pytest.fixture(autouse=True)
def only_new_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares a sleep of level 2 the visit of a million objects that pytest has made."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


def make_engine(folder: Path, **options: object) -> Engine:
    options = {"enable_sleep_mode": True, **options}
    return Engine(engine_config(folder, **options), make_runner(folder, **options))


def answers(engine: Engine, params: SamplingParams | None = None) -> dict[str, Output]:
    requests = [
        request(str(number), prompt, params or greedy(12)) for number, prompt in enumerate(PROMPTS)
    ]
    return {name: output for (name, _), output in run(engine, requests).items()}


def tokens(engine: Engine) -> dict[str, list[int]]:
    return {name: output.token_ids for name, output in answers(engine).items()}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_tokens_after_a_sleep_are_the_same(
    checkpoint: CheckpointMaker, level: SleepLevel, backend: str, async_scheduling: bool
) -> None:
    engine = make_engine(
        checkpoint("llama"), attention_backend=backend, async_scheduling=async_scheduling
    )
    before = tokens(engine)
    for _ in range(2):
        engine.sleep(level)
        engine.wake_up()
        assert tokens(engine) == before


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["gemma3", "qwen3-next", "mixtral"])
def test_models_of_all_kinds_sleep(
    checkpoint: CheckpointMaker, level: SleepLevel, name: str
) -> None:
    engine = make_engine(checkpoint(name))
    before = tokens(engine)
    engine.sleep(level)
    engine.wake_up()
    assert tokens(engine) == before


@pytest.mark.parametrize("level", LEVELS)
def test_a_prefix_on_the_device_is_lost(checkpoint: CheckpointMaker, level: SleepLevel) -> None:
    engine = make_engine(checkpoint("llama"))
    answers(engine)
    assert any(output.cached_tokens for output in answers(engine).values())
    engine.sleep(level)
    assert engine.stats().blocks_cached == 0
    engine.wake_up()
    assert not any(output.cached_tokens for output in answers(engine).values())


@pytest.mark.parametrize("level", LEVELS)
def test_prefixes_in_the_tiers_survive(
    checkpoint: CheckpointMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    level: SleepLevel,
) -> None:
    monkeypatch.setattr(CopyCosts, "load_is_cheaper", lambda *_: True)
    options = {"swap_space": 0.01, "kv_offloading_folder": str(tmp_path)}
    engine = make_engine(checkpoint("llama"), **options)
    before = tokens(engine)
    engine.sleep(level)
    engine.wake_up()
    after = answers(engine)
    assert {name: output.token_ids for name, output in after.items()} == before
    assert all(output.cached_tokens for output in after.values())


def resident() -> int:
    size: int = psutil.Process(os.getpid()).memory_info().rss
    return size


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 80 MiB whose tokens have 12 KiB of KV."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 1536}
    heads: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 128}
    return save_checkpoint(tmp_path_factory.mktemp("large"), "llama", **sizes, **heads)


@pytest.mark.parametrize("level", LEVELS)
def test_the_memory_is_given_back(large: Path, level: SleepLevel) -> None:
    config = engine_config(
        large,
        enable_sleep_mode=True,
        attention_backend="auto",
        block_size=16,
        num_blocks=1024,
        max_num_batched_tokens=512,
    )
    runner = ModelRunner(config)
    engine = Engine(config, runner)
    long = [request(str(number), [number + 4] * 100, greedy(1)) for number in range(16)]
    run(engine, long)
    awake, stats = resident(), engine.stats()
    weights = (large / "model.safetensors").stat().st_size
    cached = stats.blocks_cached * config.block_size * runner.kv_bytes_per_token
    wanted = cached + (weights if level == 2 else 0)
    engine.sleep(level)
    asleep = resident()
    engine.wake_up()
    run(engine, long[:1])
    mib = [round(size / 2**20) for size in (awake, asleep, resident(), wanted)]
    text = f"level {level}: MiB awake, asleep, awake again, and given back at least: {mib}"
    print(text)  # noqa: T201
    assert awake - asleep > 0.7 * wanted


def test_a_checkpoint_that_has_changed_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    engine = make_engine(folder)
    engine.sleep(2)
    os.utime(folder / "model.safetensors", ns=(0, 0))
    with pytest.raises(CheckpointError, match="have changed while the engine slept"):
        engine.wake_up()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2"),
        (
            {"speculative_config": SpeculativeConfig(method="draft_model", model="other")},
            "a draft model",
        ),
    ],
)
def test_what_cannot_sleep_is_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"enable_sleep_mode does not support {named}"):
        engine_config(Path("m"), enable_sleep_mode=True, **options)
