"""Ranks with whole experts give the tokens of one process: for all mixtures, however many experts
there are and however they are stored. Each rank reads its own experts only.

Most ranks here are threads with real gloo collectives. Left out: GPUs and NCCL, which need more
than one device; test_experts has the kernels of one rank.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Lock, current_thread
from typing import Any, ClassVar

import pytest
import torch

from headrace_common.sampling.params import SamplingParams
from headrace_engine import attention
from headrace_engine.checkpoints.loading import data_ranges
from headrace_engine.checkpoints.tensor_files import TensorFiles
from headrace_engine.core.errors import ConfigError
from headrace_engine.cuda_graphs import cuda_graphs
from headrace_engine.cuda_graphs.cuda_graphs import CaptureSizes, DecodeRecorder
from headrace_engine.engine.engine import Engine
from headrace_engine.layers.expert_weights import MixtureParts
from headrace_engine.layers.feed_forward import FeedForward
from headrace_engine.lora.batch import LayerLoRA
from headrace_engine.model_loader import loader
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.models.parallel import Shard
from headrace_engine.operators.base import TorchOps
from headrace_engine.operators.triton_experts import GroupedMoe
from headrace_testing.checkpoints import GreedyPath, Reference, save_checkpoint
from headrace_testing.engines import engine_config, greedy, request, run
from headrace_testing.gguf_checkpoints import save_gguf
from headrace_testing.quantized import awq, save_fp8, save_mxfp4, save_quantized
from headrace_testing.rank_threads import close, make_engine
from headrace_testing.recorded_steps import PaddedReference, Replays

LENGTH = 8

CheckpointMaker = Callable[[str], Path]
ReferenceMaker = Callable[[str], Reference]
Tokens = list[tuple[int, ...]]


def tokens_of(engine: Engine, paths: list[GreedyPath]) -> Tokens:
    requests = [request(str(i), path.prompt, greedy(LENGTH)) for i, path in enumerate(paths)]
    outputs = run(engine, requests)
    return [tuple(outputs[one.request_id, 0].token_ids) for one in requests]


def check(folder: Path, paths: list[GreedyPath], size: int, **options: Any) -> None:
    """Ranks with whole experts must generate these paths."""
    engine, runner = make_engine(folder, size, enable_expert_parallel=True, **options)
    found = tokens_of(engine, paths)
    close(runner)
    assert found == [path.output for path in paths]


@pytest.mark.proves("ranks")
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mixtral", 2),
        ("mixtral", 4),
        ("qwen2-moe", 4),
        ("qwen3-moe", 2),
        ("gpt-oss", 4),
        ("glm4-moe", 2),
        ("minimax-m2", 4),
        ("mimo-v2", 2),
        ("llama4", 4),
        ("deepseek-v2", 2),
        ("deepseek-v3", 4),
        ("deepseek-v32", 2),
        ("longcat-flash", 2),
        ("longcat-flash", 4),
        ("olmoe", 4),
        ("ernie4_5-moe", 4),
        ("hunyuan-moe", 2),
        ("granite-hybrid", 4),
        ("jamba", 2),
        ("kimi-linear", 2),
        ("lfm2-moe", 4),
        ("nemotron-h-latent", 2),
        ("qwen3-next", 2),
        ("qwen3_5-moe", 2),
    ],
)
def test_greedy_tokens_equal_transformers(
    name: str, size: int, checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    """Prompts are computed in chunks. Six experts are two, two, one and one of four ranks."""
    paths = reference(name).clear_paths(4, LENGTH)
    check(checkpoint(name), paths, size, attention_backend="auto", max_num_batched_tokens=23)


def test_ranks_in_processes_give_the_same_tokens(
    checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    paths = reference("qwen3-moe").clear_paths(2, LENGTH)
    config = engine_config(
        checkpoint("qwen3-moe"),
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        attention_backend="auto",
        threads=1,
    )
    runner = ModelRunner(config)
    found = tokens_of(Engine(config, runner), paths)
    close(runner)
    assert found == [path.output for path in paths]


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (6, 4, [(0, 2), (2, 4), (4, 5), (5, 6)]),
        (7, 3, [(0, 3), (3, 5), (5, 7)]),
        (3, 3, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_the_first_ranks_have_one_more_of_experts_that_cannot_be_divided(
    count: int, size: int, expected: list[tuple[int, int]]
) -> None:
    collectives: Any = None
    shards = [Shard(rank, size, collectives, expert_parallel=True) for rank in range(size)]
    assert [shard.experts(count) for shard in shards] == expected


def test_sizes_within_experts_need_not_be_divisible(tmp_path: Path) -> None:
    """Also Mixtral's intermediate_size, which no dense layer has. transformers' own products do not
    support such a size, so one process gives the expected numbers."""
    folder = save_checkpoint(tmp_path, "mixtral", intermediate_size=95)
    asked = [request("r", range(30, 50), SamplingParams(temperature=0.0, max_tokens=4, logprobs=5))]
    config = engine_config(folder)
    alone = run(Engine(config, ModelRunner(config)), asked)["r", 0]
    engine, runner = make_engine(folder, 2, enable_expert_parallel=True)
    found = run(engine, asked)["r", 0]
    close(runner)
    assert found.token_ids == alone.token_ids
    for own, other in zip(found.logprobs, alone.logprobs, strict=True):
        assert dict(own.top) == pytest.approx(dict(other.top), abs=1e-3)


def test_no_rank_reads_the_experts_of_another(
    checkpoint: CheckpointMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[str, set[str]] = {}
    load = TensorFiles.load

    def noted(files: TensorFiles, name: str) -> torch.Tensor:
        read.setdefault(current_thread().name, set()).add(name)
        return load(files, name)

    monkeypatch.setattr(TensorFiles, "load", noted)
    folder = checkpoint("qwen3-moe")
    _, runner = make_engine(folder, 4, enable_expert_parallel=True)
    close(runner)
    stored = data_ranges(folder / "model.safetensors").keys()
    ranks = [read[name] for name in (current_thread().name, "rank-1", "rank-2", "rank-3")]
    for names, own in zip(ranks, ((0, 1), (2, 3), (4,), (5,)), strict=True):
        others = {number for number in range(6) if number not in own}
        assert names == {
            name for name in stored if not any(f".experts.{one}." in name for one in others)
        }


@pytest.mark.parametrize("name", ["gpt-oss", "lfm2-moe", "qwen3-moe"])
def test_each_rank_reads_its_share_of_the_bytes(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if all experts of a layer are one tensor, of which only a portion is read ahead."""
    folder = save_checkpoint(tmp_path, name, published=name == "qwen3-moe")
    with caplog.at_level(logging.INFO):
        _, runner = make_engine(folder, 4, enable_expert_parallel=True)
    close(runner)
    sizes = {
        tensor: place.stop - place.start
        for tensor, place in data_ranges(folder / "model.safetensors").items()
    }
    experts = sum(size for tensor, size in sizes.items() if ".experts." in tensor)
    rest = sum(sizes.values()) - experts
    found = {
        record.threadName: vars(record)["bytes"]
        for record in caplog.records
        if record.getMessage() == "weights loaded"
    }
    names = (current_thread().name, "rank-1", "rank-2", "rank-3")
    assert [found[one] for one in names] == [rest + experts * own // 6 for own in (2, 2, 1, 1)]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3-moe", {}),
        ("ernie4_5-moe", {}),
        ("deepseek-v3", {"v_head_dim": 24, "n_shared_experts": 2}),
    ],
)
def test_quantised_experts_are_not_cut(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Half of an expert's 48 inputs would end within a group of 16."""
    packed, whole = save_quantized(tmp_path, name, awq(16), **changes)
    with pytest.raises(ConfigError, match="cuts the 48 inputs of .*experts.* 3 quantisation"):
        make_engine(packed, 2)
    check(packed, Reference(whole).clear_paths(1, LENGTH), 2)


def test_experts_in_mxfp4_are_read_from_one_tensor(tmp_path: Path) -> None:
    packed, whole = save_mxfp4(tmp_path)
    check(packed, Reference(whole).clear_paths(1, LENGTH), 4, attention_backend="auto")


def test_experts_in_fp8(tmp_path: Path) -> None:
    packed, whole = save_fp8(tmp_path, "qwen3-moe", (16, 16))
    check(packed, Reference(whole).clear_paths(1, LENGTH), 2)


def test_experts_of_a_gguf_file(tmp_path: Path) -> None:
    changes = {"mlp_only_layers": [], "norm_topk_prob": True, "moe_intermediate_size": 64}
    packed, whole = save_gguf(tmp_path, "qwen3-moe", lambda _: "Q8_0", **changes)
    check(packed, Reference(whole).clear_paths(1, LENGTH), 2)


class GroupedOps(TorchOps):
    """Plain torch, except for mixtures, whose kernels the interpreter runs for one rank at a
    time."""

    lock: ClassVar[Lock] = Lock()

    def mixture(self, parts: MixtureParts) -> FeedForward:
        return OneAtATime(GroupedMoe(parts, capability=(9, 0)))


class OneAtATime:
    can_be_recorded = True

    def __init__(self, own: FeedForward) -> None:
        self._own = own

    def __call__(
        self, x: torch.Tensor, lora: LayerLoRA | None = None, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        with GroupedOps.lock:
            return self._own(x, lora, slots)


def test_each_rank_replays_steps_with_its_own_experts(
    checkpoint: CheckpointMaker, reference: ReferenceMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of GPUs through Triton's interpreter, in graphs that are emulated. Steps of two
    sequences are padded to four."""
    replays = Replays()
    monkeypatch.setattr(attention, "select", lambda *_: PaddedReference())
    monkeypatch.setattr(loader, "TorchOps", GroupedOps)
    monkeypatch.setattr(DecodeRecorder, "refusal", lambda _: None)
    monkeypatch.setattr(cuda_graphs, "CudaCapture", lambda: replays)
    monkeypatch.setattr(CaptureSizes, "up_to", lambda count, length: CaptureSizes((4,), (length,)))
    paths = reference("qwen2-moe").clear_paths(2, LENGTH)
    engine, runner = make_engine(
        checkpoint("qwen2-moe"), 2, enable_expert_parallel=True, max_num_seqs=4
    )
    runner.warm_up()
    found = tokens_of(engine, paths)
    close(runner)
    assert found == [path.output for path in paths]
    assert len(replays.used) >= 2 * (LENGTH - 1), "of both ranks"


@pytest.mark.parametrize(
    ("name", "size", "changes", "words"),
    [
        ("llama", 2, {}, "enable_expert_parallel is on, but this model has no mixture"),
        ("mixtral", 4, {"num_local_experts": 3}, "of 4 ranks whole experts, and .* has 3: lower"),
        ("qwen2-moe", 2, {"shared_expert_intermediate_size": 95}, r"shared_expert_.* \(95\)"),
        ("glm4-moe", 2, {"intermediate_size": 95}, r"does not divide intermediate_size \(95\)"),
        ("qwen3_5", 2, {}, "enable_expert_parallel is on, but this model has no mixture"),
    ],
)
def test_what_cannot_be_spread_is_refused(
    name: str, size: int, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, name, **changes)
    with pytest.raises(ConfigError, match=words):
        make_engine(folder, size, enable_expert_parallel=True)


def test_with_one_process_nothing_is_spread(
    checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    paths = reference("mixtral").clear_paths(1, LENGTH)
    config = engine_config(checkpoint("mixtral"), enable_expert_parallel=True)
    assert tokens_of(Engine(config, ModelRunner(config)), paths) == [paths[0].output]
