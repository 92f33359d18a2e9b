"""Adapters over several ranks: the tokens of merged weights, whatever the architecture, and slots
that get new adapters on all ranks alike.

Ranks are threads with real gloo collectives. Left out: GPUs and NCCL; test_e2e has the processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace_engine import attention
from headrace_engine.core.errors import CheckpointError, ConfigError
from headrace_engine.core.speculative_config import SpeculativeConfig
from headrace_engine.cuda_graphs import cuda_graphs
from headrace_engine.cuda_graphs.cuda_graphs import CaptureSizes, DecodeRecorder
from headrace_engine.distributed import commands, rank
from headrace_engine.engine.engine import Engine
from headrace_engine.kv_cache.memory_budget import Profile
from headrace_engine.lora.adapter import AdapterFile
from headrace_engine.lora.batch import LoRABatch, RowOwners
from headrace_engine.model_loader import loader
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.models import native, placed_model
from headrace_testing.adapter_scenes import ADAPTERS, LENGTH, AdapterScene
from headrace_testing.adapters import ALL_MODULES, save_adapter
from headrace_testing.engines import engine_config, greedy, request, run
from headrace_testing.rank_threads import RankThread
from headrace_testing.recorded_steps import PaddedReference, Replays
from headrace_testing.tiled_lora import TiledOps, emulate_kernels

CheckpointMaker = Callable[[str], Path]
NGRAM = SpeculativeConfig(method="ngram", prompt_lookup_min=1, adaptive=False)


class Bench:
    """An engine with `size` ranks and a scene's adapters, two of which run at once."""

    def __init__(self, scene: AdapterScene, size: int = 2, **options: Any) -> None:
        usual: dict[str, Any] = {
            "lora_modules": {name: str(folder) for name, folder in scene.folders.items()},
            "max_loras": 2,
            "attention_backend": "auto",
            "tensor_parallel_size": size,
            "threads": 1,
            "enable_lora": True,
        }
        config = engine_config(scene.checkpoint, **{**usual, **options})
        self.scene, self.runner = scene, ModelRunner(config, launch=RankThread)
        self.engine = Engine(config, self.runner)
        self.count = 0

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.runner.peers is not None
        self.runner.peers.close()

    def serve(self, names: Sequence[str | None], count: int = 2) -> None:
        """Runs all prompts of these adapters at once; they must give the tokens of merged
        weights."""
        self.count += 1
        paths = {name: self.scene.paths(name, count) for name in names}
        requests = [
            replace(request(f"{self.count}-{index}-{name}", path.prompt, greedy(LENGTH)), lora=name)
            for name in names
            for index, path in enumerate(paths[name])
        ]
        outputs = run(self.engine, requests)
        found = [tuple(outputs[one.request_id, 0].token_ids) for one in requests]
        assert found == [path.output for name in names for path in paths[name]]


@pytest.mark.proves("ranks", by="shape")
@pytest.mark.proves("adapters", by="shape")
@pytest.mark.parametrize(
    ("shape", "size", "modules"),
    [
        ("llama", 4, ALL_MODULES),  # two ranks share each KV head
        ("llama3-rope", 2, ALL_MODULES),  # biases everywhere
        ("qwen2", 2, ALL_MODULES),
        ("gemma2", 2, ALL_MODULES),
        ("phi3", 2, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("qwen2-moe", 2, ALL_MODULES),
        ("mimo-v2", 4, ALL_MODULES),
    ],
)
def test_a_mixed_batch_gives_the_tokens_of_merged_weights(
    shape: str, size: int, modules: tuple[str, ...], checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """Includes adapters of experts, one by one and joined."""
    kinds: dict[str, dict[str, Any]] = {
        "a": {"modules": modules, "seed": 1, "experts": "apart"},
        "b": {"modules": modules[1:], "seed": 2, "rank": 3, "experts": "joined"},
    }
    scene = AdapterScene(tmp_path, checkpoint(shape), kinds)

    with Bench(scene, size, max_num_batched_tokens=40) as bench:
        bench.serve([None, "a", "b"])


@pytest.mark.parametrize(("shape", "size"), [("qwen2-moe", 2), ("qwen3-moe", 4)])
def test_whole_experts_of_a_rank_have_their_own_adapters(
    shape: str, size: int, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "a": {"modules": ALL_MODULES, "seed": 1, "experts": "apart"},
        "b": {"modules": ALL_MODULES[1:], "seed": 2, "rank": 3, "experts": "joined"},
    }
    scene = AdapterScene(tmp_path, checkpoint(shape), kinds)

    with Bench(scene, size, enable_expert_parallel=True, max_num_batched_tokens=40) as bench:
        bench.serve([None, "a", "b"])
        assert bench.runner.adapters is not None


@pytest.mark.parametrize(
    "options",
    [
        {"max_loras": 1, "speculative_config": NGRAM},
        {"async_scheduling": True, "num_blocks": 24, "watermark": 0.0, "swap_space": 0.01},
    ],
    ids=["turns", "pressure"],
)
def test_slots_get_new_adapters_on_all_ranks(
    adapter_scene: AdapterScene, options: dict[str, Any]
) -> None:
    """Three adapters, of which only one or two fit at once: an evicted adapter is written again,
    over modules of the previous one that it does not have."""
    with Bench(adapter_scene, **options) as bench:
        bench.serve([*ADAPTERS, None])
        for name in ("one", "all", None, "some"):
            bench.serve([name], count=1)


def test_an_adapter_added_later_needs_its_files_on_rank_0_only(
    adapter_scene: AdapterScene, tmp_path: Path
) -> None:
    folder = save_adapter(tmp_path / "late", adapter_scene.checkpoint, **ADAPTERS["all"])

    with Bench(adapter_scene, lora_modules={}) as bench:
        assert bench.runner.adapters is not None
        bench.runner.adapters.add("all", folder)
        for file in folder.iterdir():
            file.unlink()
        bench.serve([None, "all"], count=1)


def test_an_adapter_that_cannot_be_read_leaves_the_ranks_and_slots_as_they_were(
    adapter_scene: AdapterScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = AdapterFile.load

    def broken(file: AdapterFile, dtype: torch.dtype) -> Any:
        if file.folder == adapter_scene.folders["all"]:
            raise CheckpointError("the disk is broken")
        return load(file, dtype)

    with Bench(adapter_scene) as bench:
        bench.serve(["some"], count=1)
        with monkeypatch.context() as patch:
            patch.setattr(AdapterFile, "load", broken)
            with pytest.raises(CheckpointError, match="the disk is broken"):
                bench.serve(["all"], count=1)
        bench.engine = Engine(bench.runner._config, bench.runner)
        bench.serve(["all", "some", None], count=1)


def test_each_rank_records_and_replays_steps_with_adapters(
    adapter_scene: AdapterScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recordings of both ranks read the rows of adapters. The two largest recordings, with and
    without adapters, are rehearsed before the KV cache is sized. Kernels and graphs are
    emulated."""
    replays = Replays()

    def count(config: Any, device: Any, per_block: int, length: int, profile: Profile) -> int:
        return 64 if profile() else 0

    emulate_kernels(monkeypatch)
    monkeypatch.setattr(attention, "select", lambda *_: PaddedReference())
    monkeypatch.setattr(loader, "TorchOps", TiledOps)
    monkeypatch.setattr(native, "computes_natively", lambda *_: False)
    monkeypatch.setattr(DecodeRecorder, "refusal", lambda _: None)
    monkeypatch.setattr(cuda_graphs, "CudaCapture", lambda: replays)
    monkeypatch.setattr(cuda_graphs, "free_bytes", lambda _: 0)
    monkeypatch.setattr(placed_model, "count_blocks", count)
    monkeypatch.setattr(rank, "count_blocks", count)
    monkeypatch.setattr(
        CaptureSizes, "up_to", lambda count, length: CaptureSizes((1, 2, 3), (length,))
    )

    with Bench(adapter_scene, max_num_seqs=3) as bench:
        assert len(replays.recorded) == 2 * 2 * 2, "sizes, kinds, ranks"
        bench.runner.warm_up()
        bench.serve([None, "all", "some"], count=1)

    assert len(replays.recorded) == 2 * 2 * 2 + 3 * 2 * 2
    assert len(replays.used) >= 2 * (LENGTH - 1)


def test_runs_of_rows_arrive_as_they_were_sent() -> None:
    tokens = np.array([-1, -1, 2, 2, 2, 0, -1, 2], dtype=np.int64)
    for logits in (tokens[[1, 4, 7]], tokens[:0]):
        rows: Any = None
        numbers = commands.adapter_runs(LoRABatch([], rows, rows, RowOwners(tokens, logits)))
        found = commands.row_owners(numbers)
        assert found.tokens.tolist() == tokens.tolist()
        assert found.logits.tolist() == logits.tolist()
    assert commands.adapter_runs(None) == []


def test_a_model_that_embeds_has_no_adapters(checkpoint: CheckpointMaker) -> None:
    config = engine_config(
        checkpoint("qwen3"), tensor_parallel_size=2, threads=1, enable_lora=True, task="embed"
    )
    with pytest.raises(ConfigError, match="enable_lora needs the native implementation"):
        ModelRunner(config, launch=RankThread)
