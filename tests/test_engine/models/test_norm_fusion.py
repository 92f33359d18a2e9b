"""Recorded steps with norms fused into products, in Triton's interpreter."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_engine import attention
from headrace_engine.attention.triton import TritonBackend
from headrace_engine.autotune import autotuner, steps
from headrace_engine.autotune.autotuner import Autotuner, Run
from headrace_engine.cuda_graphs.cuda_graphs import CaptureSizes, GraphedModel
from headrace_engine.cuda_graphs.static_batch import StaticBatch
from headrace_engine.kernels.triton import dependent_launch
from headrace_engine.kernels.triton import launch as launches
from headrace_engine.kernels.triton.dependent_launch import PLAIN_STEP, DependentLaunch, StepLaunch
from headrace_engine.kernels.triton.launch import ROW_BOUNDS, SmallBatchLaunch
from headrace_engine.model_loader import loader
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.models.decoder.norm_fusion import NormFusingDecoder
from headrace_engine.operators.triton import TritonOps
from headrace_engine.operators.tuned_linear import TunedLinear
from headrace_testing.engines import engine_config, make_runner
from headrace_testing.recorded_steps import Replays
from headrace_testing.timers import LastWins

TILE = SmallBatchLaunch(64, 32, 1, 4, 3)
ALONE, EARLY = StepLaunch(None, fused_norms=True), DependentLaunch(early=True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates that fit small layers."""
    for name, value in {
        "SMALL_BATCH_TILES": (TILE,), "SILU_TILES": (TILE,), "SPLITS": (1, 2), "FEWEST_PROGRAMS": 0,
    }.items():  # fmt: skip
        monkeypatch.setattr(launches, name, value)


Maker = Callable[[str], ModelRunner]


@pytest.fixture
def make(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """Runners of tiny models whose steps go through Triton, as on a CUDA device."""
    monkeypatch.setattr(attention, "select", lambda *_: TritonBackend((9, 0)))
    monkeypatch.setattr(loader, "make_ops", lambda *_: TritonOps())
    monkeypatch.setattr(autotuner, "REPEATS", 0)
    monkeypatch.setattr(steps, "STEP_KEYS", 20)
    # The interpreter launches kernels one by one, without dependent launches.
    monkeypatch.setattr(
        dependent_launch, "_options", lambda _: {"DEPENDENT": dependent_launch.ALONE}
    )
    ways = {steps.ONE_BY_ONE: None, "early": EARLY}
    monkeypatch.setattr(steps, "CANDIDATES", ways)
    monkeypatch.setattr(steps, "FEWER_CANDIDATES", (steps.ONE_BY_ONE,))
    options = {"dtype": "bfloat16", "attention_backend": "auto", "num_blocks": 32}
    return lambda name: make_runner(checkpoint(name), **options)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts the calls of operators."""
    counts: Counter[str] = Counter()
    for kind, name in ((TunedLinear, "linear_add_norm"), (TritonOps, "add_rms_norm")):
        method = getattr(kind, name)

        def count(*args: Any, method: Any = method, name: str = name) -> Any:
            counts[name] += 1
            return method(*args)

        monkeypatch.setattr(kind, name, count)
    yield counts


def test_recorded_steps_fuse_norms_where_whole_steps_were_faster(
    make: Maker, called: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make("qwen3")
    model, placed = runner.model, runner._placed
    assert isinstance(model, NormFusingDecoder) and model.dependent_launches is not None
    config = engine_config(Path(runner._config.model), max_num_seqs=1)
    chooser = Autotuner(LastWins(), budget=1e9)
    with torch.inference_mode():
        steps.tune_steps(chooser, placed, config, 1, 1 << 20)
        monkeypatch.setattr(steps, "CANDIDATES", {steps.ONE_BY_ONE: None})
        steps.tune_steps(chooser, placed, config, 256, 1 << 20)
    own, fused, norms, more = chooser.choices
    assert (own.chosen, fused.chosen, norms.chosen) == ("early", "early", "fused norms")
    assert not own.refused and not fused.refused and not norms.refused
    assert fused.kernel == f"{own.kernel}, fused norms" and more.kernel == own.kernel
    assert model.dependent_launches.chosen(1) == StepLaunch(EARLY, fused_norms=True)
    assert not model.dependent_launches.chosen(80).fused_norms
    for size in (1, 2):
        called.clear()
        batch = StaticBatch(size, 8, runner.device)
        with torch.inference_mode():
            GraphedModel(model, runner._caches, CaptureSizes((size,), (20,)), batch, Replays())
        wanted = "linear_add_norm" if size == 1 else "add_rms_norm"
        assert called == {wanted: 4}, "two in each of two layers"
        assert not model.dependent_launches.fused_norms, (
            "steps that are not recorded have separate norms"
        )


def test_fused_norms_whose_replays_differ_are_not_used(make: Maker) -> None:
    runner = make("qwen2")
    config = engine_config(Path(runner._config.model), max_num_seqs=1)
    timed: list[float] = []

    def time(run: Run) -> float:
        """Changes the results of the replays that follow those with separate norms."""
        run().add_(len(timed) // 2)
        timed.append(0.5 ** len(timed))
        return timed[-1]

    chooser = Autotuner(time, budget=1e9)
    with torch.inference_mode():
        steps.tune_steps(chooser, runner._placed, config, 1, 1 << 20)
    own, fused = chooser.choices
    assert not own.refused and set(fused.refused) == {steps.ONE_BY_ONE, "early"}
    ops = runner._placed.ops
    assert isinstance(ops, TritonOps) and ops.dependent_launches.chosen(1) == StepLaunch(EARLY)


@pytest.mark.parametrize("name", ["qwen2", "phi3-partial"])
def test_fused_norms_do_not_change_the_results_of_a_step(make: Maker, name: str) -> None:
    runner = make(name)
    config = engine_config(Path(runner._config.model))
    with torch.inference_mode():
        scene = steps.StepBenchmark(runner._placed, config, 3, 1 << 20)
        plain, fused = (scene.run(way) for way in (PLAIN_STEP, ALONE))
        assert torch.equal(scene.run(ALONE), fused)
    assert 0 < (fused - plain).norm() < autotuner.TOLERANCE * plain.norm()


@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_models_with_other_norms_or_experts_do_not_fuse_norms(make: Maker, name: str) -> None:
    assert not isinstance(make(name).model, NormFusingDecoder)


def test_only_decodes_of_few_rows_without_adapters_fuse_norms(make: Maker) -> None:
    runner = make("qwen2")
    model, config = runner.model, engine_config(Path(runner._config.model), max_num_seqs=80)
    assert isinstance(model, NormFusingDecoder)
    batch, large = (
        steps.StepBenchmark(runner._placed, config, rows, 1 << 20)._batch
        for rows in (2, ROW_BOUNDS[-1] + 1)
    )
    assert model._can_fuse(batch) and not model._can_fuse(large)
    assert not model._can_fuse(replace(batch, logits_rows=batch.logits_rows[:1]))
    assert not model._can_fuse(replace(batch, lora=object()))  # type: ignore[arg-type]
