"""Greedy tokens with prefixes in host memory and in a shared folder are those without them.

A real model on the CPU, real copies and files. Blocks are so few that prefixes are evicted and
sequences are preempted.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.errors import ConfigError
from headrace_engine.core.request import EngineRequest
from headrace_engine.core.stats import SchedulerStats
from headrace_engine.engine.engine import Engine
from headrace_engine.kv_cache import shared_kv_cache
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.scheduler.copy_costs import CopyCosts

CheckpointMaker = Callable[[str], Path]
# Seconds until the files are written, on a very busy machine.
LONG = 120.0


def conversation(tenant: str, turns: int) -> Iterator[EngineRequest]:
    """Prompts that each begin with the one before."""
    for turn in range(1, turns + 1):
        prompt = tuple((ord(tenant) * 7 + index * index) % 90 + 4 for index in range(11 * turn))
        yield EngineRequest(
            request_id=f"{tenant} {turn}",
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True),
            seed=1,
            cache_salt=tenant.encode(),
        )


def all_turns() -> list[list[EngineRequest]]:
    """The requests of each turn: three tenants, two of them with the same prompts."""
    same = [replace(one, request_id=f"x{one.request_id}") for one in conversation("a", 4)]
    same = [replace(one, cache_salt=b"x") for one in same]
    others = (list(conversation(tenant, 4)) for tenant in "abc")
    return [list(turn) for turn in zip(*others, same, strict=True)]


def config_of(folder: Path, **options: object) -> EngineConfig:
    values: dict[str, object] = {
        "model": str(folder),
        "dtype": "float32",
        "block_size": 4,
        "num_blocks": 24,
        "max_model_len": 64,
        "max_num_batched_tokens": 24,
        "watermark": 0.0,
        **options,
    }
    return EngineConfig(**values)  # type: ignore[arg-type]


def serve(engine: Engine, requests: list[EngineRequest]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for request in requests:
        engine.add_request(request)
        tokens[request.request_id] = []
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    return tokens


def serve_turns(
    config: EngineConfig, *, replaced: bool = False
) -> tuple[dict[str, list[int]], list[SchedulerStats]]:
    """The tokens of all turns, and the statistics of each engine; `replaced` after each turn."""
    engine = Engine(config, ModelRunner(config))
    tokens: dict[str, list[int]] = {}
    stats: list[SchedulerStats] = []
    for turn, requests in enumerate(all_turns()):
        if replaced and turn:
            engine.close(LONG)
            stats.append(engine.stats())
            engine = Engine(config, ModelRunner(config))
        tokens |= serve(engine, requests)
    engine.close(LONG)
    return tokens, [*stats, engine.stats()]


@pytest.fixture(autouse=True)
def _copies_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies count as cheaper than computing, and requests wait for them, on any machine."""
    monkeypatch.setattr(CopyCosts, "load_is_cheaper", lambda *_: True)
    monkeypatch.setattr(shared_kv_cache, "PATIENCE", LONG)
    monkeypatch.setattr(shared_kv_cache, "LONGEST", LONG)


@pytest.fixture
def plain(checkpoint: CheckpointMaker) -> dict[str, list[int]]:
    config = config_of(checkpoint("llama"), num_blocks=200, enable_prefix_caching=False)
    return serve_turns(config)[0]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_tokens_with_host_memory_are_the_same(
    checkpoint: CheckpointMaker, plain: dict[str, list[int]], async_scheduling: bool
) -> None:
    config = config_of(checkpoint("llama"), swap_space=0.02, async_scheduling=async_scheduling)
    tokens, (stats,) = serve_turns(config)
    assert tokens == plain
    assert stats.host_hit_tokens > 0, "prefixes are evicted"
    assert stats.swaps + stats.preemptions > 0, "sequences are preempted"


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_engines_one_after_the_other_go_on_with_the_same_tokens(
    checkpoint: CheckpointMaker,
    plain: dict[str, list[int]],
    tmp_path: Path,
    async_scheduling: bool,
) -> None:
    config = config_of(
        checkpoint("llama"),
        swap_space=0.02,
        kv_offloading_folder=str(tmp_path),
        async_scheduling=async_scheduling,
    )
    tokens, stats = serve_turns(config, replaced=True)
    assert tokens == plain
    assert stats[0].shared_hit_tokens == 0
    assert all(each.shared_hit_tokens > 0 for each in stats[1:])


def test_damaged_files_are_computed_again(
    checkpoint: CheckpointMaker, plain: dict[str, list[int]], tmp_path: Path
) -> None:
    config = config_of(checkpoint("llama"), swap_space=0.02, kv_offloading_folder=str(tmp_path))
    serve_turns(config)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for number, path in enumerate(files):
        stored = bytearray(path.read_bytes())
        stored[-1 - number % 50] ^= 1
        path.write_bytes(stored)
    tokens, (stats,) = serve_turns(config)
    assert tokens == plain
    assert stats.shared is not None and stats.shared.blocks_failed > 0
    assert stats.shared_hit_tokens == 0


def test_a_folder_that_cannot_be_written_changes_nothing(
    checkpoint: CheckpointMaker,
    plain: dict[str, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.writev", lambda file, parts: 10)
    config = config_of(checkpoint("llama"), swap_space=0.02, kv_offloading_folder=str(tmp_path))
    tokens, (stats,) = serve_turns(config)
    assert tokens == plain
    assert stats.shared is not None and stats.shared.bytes_out == 0
    assert stats.shared.blocks_skipped > 0


@pytest.mark.parametrize(
    "other", [{"dtype": "bfloat16"}, {"block_size": 8}, {"max_model_len": 60}, {"model": "qwen3"}]
)
def test_engines_with_other_kv_do_not_read_it(
    checkpoint: CheckpointMaker, tmp_path: Path, other: dict[str, object]
) -> None:
    options = {"swap_space": 0.02, "kv_offloading_folder": str(tmp_path)}
    (first, *_), *_ = all_turns()
    config = config_of(checkpoint("llama"), **options)
    engine = Engine(config, ModelRunner(config))
    serve(engine, [first])
    engine.close(LONG)
    folder = checkpoint(str(other.pop("model", "llama")))
    config = config_of(folder, **{**options, **other})
    engine = Engine(config, ModelRunner(config))
    serve(engine, [first])
    assert engine.stats().prefix_hit_tokens == 0


def test_a_copy_of_the_checkpoint_reads_the_same_kv(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    folder = checkpoint("llama")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    kv = str(tmp_path / "kv")
    (first, *_), *_ = all_turns()
    for model, hits in ((folder, 0), (copy, 8)):
        config = config_of(model, swap_space=0.02, kv_offloading_folder=kv)
        engine = Engine(config, ModelRunner(config))
        serve(engine, [first])
        engine.close(LONG)
        assert engine.stats().shared_hit_tokens == hits


@pytest.mark.parametrize(
    "options",
    [
        {"swap_space": 0.0},
        {"enable_prefix_caching": False},
        {"tensor_parallel_size": 2},
        {"kv_offloading_folder_size": 0.0},
    ],
)
def test_what_a_folder_needs_is_checked(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="kv_offloading_folder"):
        config_of(Path("any"), **{"swap_space": 1.0, "kv_offloading_folder": "kv", **options})


def test_a_folder_that_cannot_be_made_is_named(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder, size, words in (("file/kv", 1.0, "cannot be used"), ("kv", 1e-9, "less than one")):
        config = config_of(
            checkpoint("llama"),
            swap_space=0.02,
            kv_offloading_folder=str(tmp_path / folder),
            kv_offloading_folder_size=size,
        )
        with pytest.raises(ConfigError, match=words):
            ModelRunner(config)
