"""Recorded steps that compute prompts, on the CPU with a stand-in that runs a step again where a
graph would be replayed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_engine import attention
from headrace_engine.core.config import EngineConfig
from headrace_engine.cuda_graphs import mixed_steps
from headrace_engine.cuda_graphs.capture import Capture
from headrace_engine.cuda_graphs.cuda_graphs import CaptureSizes, DecodeRecorder, GraphedModel
from headrace_engine.cuda_graphs.mixed_steps import MixedSizes
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_testing.engines import engine_config, greedy, make_runner, request, run
from headrace_testing.recorded_steps import CountedReference, PaddedReference, Replays

BUDGET, SEQUENCES = 24, 6


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of 8, 16 and 24 tokens, of at most 3 prompts."""
    monkeypatch.setattr(mixed_steps, "TOKENS_STEP", 8)
    monkeypatch.setattr(mixed_steps, "MOST_PROMPTS", 3)


@pytest.fixture
def runner(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr(attention, "select", lambda *_: CountedReference())
    return make_runner(checkpoint("qwen3"), num_blocks=128, max_num_seqs=SEQUENCES)


def config(folder: Path, **options: Any) -> EngineConfig:
    return engine_config(
        folder, max_num_seqs=SEQUENCES, max_num_batched_tokens=BUDGET,
        enable_prefix_caching=False, **options,
    )  # fmt: skip


def recorder(runner: ModelRunner, settings: EngineConfig) -> DecodeRecorder:
    return DecodeRecorder(
        runner.model, runner.attention, runner._caches, settings, runner.max_model_len
    )


def record(runner: ModelRunner, settings: EngineConfig, capture: Capture) -> GraphedModel:
    made = recorder(runner, settings)
    sizes = CaptureSizes((SEQUENCES,), (runner.max_model_len,))
    return made.record(sizes, made.static_batch(), capture, made.mixed_batch())


def test_every_mixture_of_prompts_and_decodes_gives_the_tokens_of_steps_without_graphs(
    runner: ModelRunner, checkpoint: Any
) -> None:
    """Prompts of 1 to 40 tokens: alone, several at once, in chunks beside decodes."""
    settings = config(checkpoint("qwen3"))
    lengths = (5, 1, 40, 13, 2, 7, 30, 3, 11)
    work = [request(str(n), range(3, 3 + size), greedy(4 + n)) for n, size in enumerate(lengths)]
    expected = run(Engine(settings, runner), work)
    replays, steps = Replays(), []
    recorded = record(runner, settings, replays)

    class Counting:
        """Counts the steps."""

        vocab_size, kv_shapes = recorded.vocab_size, recorded.kv_shapes

        def forward(self, batch: Any, caches: Any) -> torch.Tensor:
            steps.append(len(batch.input_ids))
            return recorded.forward(batch, caches)

    runner.model = Counting()
    assert run(Engine(settings, runner), work) == expected
    assert replays.recorded == [(6, 256)] * 4, "three of mixed steps, one of decodes"
    assert len(steps) > 15
    assert len(steps) - len(replays.used) < 2, "a step with more than three prompts has no graph"


def test_a_step_with_more_prompts_than_any_graph_runs_without_one(
    runner: ModelRunner, checkpoint: Any
) -> None:
    settings, replays = config(checkpoint("qwen3")), Replays()
    runner.model = record(runner, settings, replays)
    run(Engine(settings, runner), [request(str(n), range(3, 6), greedy(1)) for n in range(4)])
    assert replays.used == []
    run(Engine(settings, runner), [request("3", range(3, 6), greedy(1))])
    assert len(replays.used) == 1
    run(Engine(settings, runner), [request("long", range(3, 28), greedy(1))])
    assert len(replays.used) == 3, "two chunks, each with a graph"


def test_only_backends_that_count_decodes_on_the_device_are_recorded_with_prompts(
    runner: ModelRunner,
) -> None:
    assert recorder(runner, config(Path("unused"))).mixed_batch() is not None
    assert recorder(runner, config(Path("unused"), deterministic=True)).mixed_batch() is None
    runner.attention = PaddedReference()
    assert recorder(runner, config(Path("unused"))).mixed_batch() is None


def test_sizes_end_with_the_budget_and_the_longest_context() -> None:
    assert MixedSizes.up_to(20, 100) == MixedSizes((8, 16), (100,))
    assert MixedSizes.up_to(8192, 9000).tokens[-1] == 1024
    assert MixedSizes.up_to(8192, 9000).contexts == (4096, 9000)
    assert MixedSizes.up_to(7, 100).tokens == ()
