"""Recorded decode steps, on the CPU with a stand-in that runs a step again where a graph would be
replayed: which step is replayed, with which padding, and that tokens stay the same.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine import attention
from headrace_engine.core.attention_backend import AttentionMetadata
from headrace_engine.cuda_graphs.capture import MeteredCapture
from headrace_engine.cuda_graphs.cuda_graphs import (
    CaptureSizes,
    DecodeRecorder,
    GraphedModel,
    measure_graphs,
    record_graphs,
)
from headrace_engine.cuda_graphs.static_batch import (
    DecodeInputs,
    Stage,
    StaticBatch,
    stage_by_copies,
    stage_by_kernel,
)
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.models.base import ForwardBatch
from headrace_engine.serving.settings import EngineSettings
from headrace_testing.engines import engine_config, greedy, make_runner, request, run
from headrace_testing.recorded_steps import PaddedReference, Replays

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def runner(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr(attention, "select", lambda *_: PaddedReference())
    folder: Path = checkpoint("qwen3")
    return make_runner(folder, num_blocks=128, max_num_seqs=8)


def record(runner: ModelRunner, sizes: CaptureSizes) -> Replays:
    replays = Replays()
    batch = StaticBatch(sizes.batch_sizes[-1], runner.max_model_len // 4, runner.device)
    with torch.inference_mode():
        runner.model = GraphedModel(runner.model, runner._caches, sizes, batch, replays)
    return replays


def test_tokens_equal_those_of_steps_without_graphs(runner: ModelRunner, checkpoint: Any) -> None:
    """Batches of all sizes up to 7, of which six sizes are padded and one has no recording."""
    config = engine_config(checkpoint("qwen3"), max_num_seqs=8, enable_prefix_caching=False)
    work = [request(str(n), range(3, 4 + 3 * n), greedy(3 + 2 * n)) for n in range(7)]
    expected = run(Engine(config, runner), work)
    replays = record(runner, CaptureSizes((2, 4, 6), (24, 512)))
    assert replays.recorded == [(size, 256) for size in (6, 6, 4, 4, 2, 2)]
    assert run(Engine(config, runner), work) == expected
    assert set(replays.used) == {2, 4, 6}
    assert len(replays.used) > 8


def test_steps_with_prompts_are_launched_without_a_graph(runner: ModelRunner) -> None:
    replays = record(runner, CaptureSizes((4,), (16,)))
    folder_config = engine_config(Path("unused"), max_num_seqs=8)
    run(Engine(folder_config, runner), [request("prompt", range(3, 9), greedy(1))])
    assert replays.used == []
    run(Engine(folder_config, runner), [request("long", range(3, 19), greedy(3))])
    assert replays.used == []
    run(Engine(folder_config, runner), [request("short", range(3, 9), greedy(3))])
    assert replays.used == [4, 4]


@pytest.mark.parametrize("stage", [stage_by_copies, stage_by_kernel])
def test_a_smaller_step_overwrites_all_of_a_larger_one(stage: Stage) -> None:
    batch = StaticBatch(4, 3, DEVICE)
    batch._stage = stage
    batch.fill(decode(4, width=3), 4)
    batch.fill(decode(2, width=1), 4)
    view = batch.view(4, 99)
    assert view.metadata.slots.tolist() == [100, 101, -1, -1]
    assert view.metadata.seq_lens.tolist() == [10, 11, 0, 0]
    assert view.metadata.block_tables[:, 0].tolist() == [7, 7, 7, 7]
    assert view.input_ids[:2].tolist() == view.positions[:2].tolist() == [0, 1]
    assert view.logits_rows.tolist() == [0, 1, 2, 3]
    assert view.metadata.query_start.tolist() == [0, 1, 2, 3, 4]
    assert view.metadata.max_seq_len == 99


def test_long_block_tables_are_staged_whole() -> None:
    """One launch gives the same as copies, for tables longer than one program copies at a time."""
    source = DecodeInputs.of(decode(3, width=200))
    source.tables.copy_(torch.arange(600).view(3, 200))
    found, expected = (DecodeInputs.of(decode(5, width=300)) for _ in range(2))
    stage_by_kernel(source, found, 5)
    stage_by_copies(source, expected, 5)
    assert torch.equal(found.tables, expected.tables)
    assert torch.equal(found.slots, expected.slots)


def decode(count: int, width: int) -> ForwardBatch:
    numbers = torch.arange(count, device=DEVICE)
    metadata = AttentionMetadata(
        query_start=torch.arange(count + 1, dtype=torch.int32, device=DEVICE),
        seq_lens=(10 + numbers).int(),
        block_tables=torch.full((count, width), 7, dtype=torch.int32, device=DEVICE),
        slots=100 + numbers,
        num_decodes=count,
        max_query_len=1,
        max_seq_len=10 + count,
    )
    return ForwardBatch(numbers, numbers, numbers, metadata)


@given(st.integers(1, 2000), st.integers(1, 200_000))
def test_every_batch_size_has_a_graph_with_little_padding(seqs: int, length: int) -> None:
    sizes = CaptureSizes.up_to(seqs, length)
    assert (
        list(sizes.batch_sizes) == sorted(set(sizes.batch_sizes)) and sizes.batch_sizes[-1] == seqs
    )
    assert list(sizes.contexts) == sorted(set(sizes.contexts)) and sizes.contexts[-1] == length
    assert sizes.batch_size(seqs + 1) is None and sizes.context(length + 1) is None
    for count in {1, seqs // 3 + 1, seqs}:
        size = sizes.batch_size(count)
        assert size is not None and count <= size < max(2 * count, count + 128)


def test_the_memory_of_all_graphs_is_known_from_two(runner: ModelRunner) -> None:
    """The first graph takes the pool and its own memory, 90 bytes; each further one takes 7."""
    left = iter([1000, 910, 903])
    metered = MeteredCapture(Replays(), lambda: next(left))
    sizes = CaptureSizes((1, 2, 4, 6), (24, 512))
    batch = StaticBatch(6, runner.max_model_len // 4, runner.device)
    with torch.inference_mode():
        GraphedModel(runner.model, runner._caches, sizes.top(), batch, metered)
    assert sizes.top() == CaptureSizes((4, 6), (512,))
    assert metered.free_after == [1000, 910, 903] and metered.extrapolated(8) == 90 + 7 * 7
    assert metered.extrapolated(1) == 90
    metered.free_after = [1000, 910, 906, 895]
    assert metered.extrapolated(4) == 90 + 3 * 11, "as the dearest that was made"


def test_nothing_is_recorded_without_a_cuda_device(runner: ModelRunner) -> None:
    config = engine_config(Path("unused"))
    decodes = DecodeRecorder(runner.model, runner.attention, runner._caches, config, 512)
    assert record_graphs(decodes) is runner.model
    assert measure_graphs(decodes) == 0
    assert EngineSettings(model="m", enforce_eager=True).engine_config().enforce_eager
