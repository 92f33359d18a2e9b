"""Kernels that start before the previous one has ended: only while a step is recorded, and only if
whole steps were measured to be faster with the same bits. Times are given by the tests, not
measured. test_triton_compile shows in the compiled code that such kernels wait for all before them.
"""

import ast
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from headrace_engine import attention
from headrace_engine.attention.triton import TritonBackend
from headrace_engine.autotune import autotuner, start, steps
from headrace_engine.autotune.autotuner import Autotuner, Run
from headrace_engine.cuda_graphs.cuda_graphs import CaptureSizes, GraphedModel
from headrace_engine.cuda_graphs.static_batch import StaticBatch
from headrace_engine.kernels.triton import dependent_launch
from headrace_engine.kernels.triton.dependent_launch import (
    PLAIN_STEP,
    DependentLaunch,
    DependentLaunches,
    StepLaunch,
)
from headrace_engine.kernels.triton.launch import ROW_BOUNDS, SmallBatchLaunch
from headrace_engine.model_loader import loader
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.models.decoder.decoder import Decoder
from headrace_engine.operators.triton import TritonOps
from headrace_testing.engines import engine_config, make_runner
from headrace_testing.recorded_steps import Replays
from headrace_testing.timers import LastWins

AHEAD, EARLY = DependentLaunch(4 << 20), DependentLaunch(early=True)
ALONE = {"DEPENDENT": dependent_launch.ALONE}
LATE = {"DEPENDENT": dependent_launch.DEPENDENT, "launch_pdl": True}
AT_ONCE = {"DEPENDENT": dependent_launch.EARLY, "launch_pdl": True}


def test_kernels_do_not_overlap_by_default() -> None:
    launches = DependentLaunches()
    ahead, early = StepLaunch(AHEAD, fused_norms=True), StepLaunch(EARLY)
    launches.choose(16, ahead)
    launches.choose(1, early)
    launches.choose(4, PLAIN_STEP)
    assert launches.product == launches.small == ALONE and launches.prefetched(1, 1024) == 0
    chosen = [launches.chosen(rows) for rows in (1, 4, 5, 16, 17)]
    assert chosen == [early, PLAIN_STEP, ahead, ahead, PLAIN_STEP]
    with launches.during(launches.chosen(1)):
        assert (launches.product, launches.small) == (LATE, AT_ONCE)
        assert launches.prefetched(4096, 8192) == 0 and not launches.fused_norms
        with suppress(ZeroDivisionError), launches.during(ahead):
            assert launches.product == launches.small == LATE and launches.fused_norms
            raise ZeroDivisionError
        assert launches.small == AT_ONCE and not launches.fused_norms
    assert launches.small == ALONE


@pytest.mark.parametrize("rows", [1, 300, 4096, 6144, 4 * 4096, 28672, 128_256])
def test_prefetched_bytes_fit_the_cache_and_the_rows(rows: int) -> None:
    launches = DependentLaunches()
    for wanted in (1 << 20, 4 << 20, 16 << 20):
        with launches.during(StepLaunch(DependentLaunch(wanted))):
            size = launches.prefetched(rows, 8192 + 128)
        assert size % 256 == 0 and size <= 8192 and rows * size <= 16 << 20
        full = math.ceil(wanted / rows / 256) * 256
        assert size == min(8192, full) or rows * full > 16 << 20


@pytest.fixture
def launch_modes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records how kernels should be launched; the interpreter launches them one by one anyway."""
    modes: list[int] = []

    def options(how: int) -> dict[str, int]:
        modes.append(how)
        return ALONE

    monkeypatch.setattr(dependent_launch, "_options", options)
    return modes


@pytest.fixture
def runner(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelRunner]:
    """The runner of a tiny model whose steps use Triton, as on a CUDA device."""
    monkeypatch.setattr(attention, "select", lambda *_: TritonBackend((9, 0)))
    monkeypatch.setattr(loader, "make_ops", lambda *_: TritonOps())
    monkeypatch.setattr(autotuner, "REPEATS", 1)
    monkeypatch.setattr(steps, "STEP_KEYS", 20)
    candidates = {steps.ONE_BY_ONE: None, "ahead": AHEAD, "early": EARLY}
    monkeypatch.setattr(steps, "CANDIDATES", candidates)
    folder = checkpoint("qwen3")
    options = {"dtype": "bfloat16", "attention_backend": "auto", "num_blocks": 32}
    yield make_runner(folder, **options)


def measure(runner: ModelRunner, config: Any, bound: int, chooser: Autotuner) -> None:
    with torch.inference_mode():
        steps.tune_steps(chooser, runner._placed, config, bound, 1 << 20)


def test_recorded_steps_use_the_launch_mode_with_the_fastest_whole_steps(
    runner: ModelRunner, launch_modes: list[int]
) -> None:
    config = engine_config(Path(runner._config.model), max_num_seqs=3)
    assert steps.can_tune_steps(runner._placed)
    chooser = Autotuner(LastWins(), budget=1e9)
    measure(runner, config, 1, chooser)
    (choice,) = chooser.choices
    assert choice.kernel.startswith("step, rows 1, keys 20, 2 layers, ")
    assert choice.chosen == "early" and not choice.refused and choice.read_bytes > 0
    assert set(launch_modes) == {
        dependent_launch.ALONE,
        dependent_launch.DEPENDENT,
        dependent_launch.EARLY,
    }
    model = runner.model
    assert isinstance(model, Decoder) and model.dependent_launches is not None
    assert model.dependent_launches.chosen(1) == StepLaunch(EARLY)
    assert model.dependent_launches.chosen(2) is PLAIN_STEP
    for size, expected_modes in (
        (1, {dependent_launch.DEPENDENT, dependent_launch.EARLY}),
        (2, {dependent_launch.ALONE}),
    ):
        launch_modes.clear()
        batch = StaticBatch(size, 8, runner.device)
        with torch.inference_mode():
            GraphedModel(model, runner._caches, CaptureSizes((size,), (20,)), batch, Replays())
        assert set(launch_modes) == expected_modes
        assert model.dependent_launches.small == ALONE, (
            "steps without a recording use plain launches"
        )


def test_a_launch_mode_that_changes_bits_is_not_used(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a kernel that reads data before it is written."""
    run: list[DependentLaunch | None] = []

    def racing(model: Decoder, *_: Any) -> torch.Tensor:
        assert model.dependent_launches is not None
        run.append(model.dependent_launches._now)
        return torch.tensor([1.0, 2.0 if run[-1] is None else 2.001])

    monkeypatch.setattr(Decoder, "forward", racing)
    chooser = Autotuner(LastWins(), budget=1e9)
    measure(runner, engine_config(Path(runner._config.model)), 16, chooser)
    (choice,) = chooser.choices
    assert choice.chosen == "one by one" and set(choice.refused) == {"ahead", "early"}
    assert set(run) == {None, AHEAD, EARLY}


def test_whole_steps_are_measured_from_hopper_on_and_in_one_process(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []
    monkeypatch.setattr(start, "tune_steps", lambda *found: measured.append(found[3]))
    monkeypatch.setattr(start, "_pool_bytes", lambda *_: 1 << 20)
    monkeypatch.setattr(start, "tune_attention", lambda *_: None)
    for name in ("_tune_products", "_tune_experts"):
        monkeypatch.setattr(start, name, lambda *_: None)
    config = engine_config(Path(runner._config.model), max_num_seqs=40)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    on_device = replace(runner._placed, device=torch.device("cuda"))
    for placed in (runner._placed, replace(on_device, model=Mock(kv_shapes=()))):
        start.tune_with(Autotuner(LastWins()), placed, config)
    assert measured == []
    start.tune_with(Autotuner(LastWins()), on_device, config)
    assert measured == [1, 16, 64]


def test_a_launch_mode_whose_replays_differ_is_not_used() -> None:
    """When the host launches kernels, they hardly overlap: a race shows only in replays."""

    class Recording:
        """A device on which replays of any candidate but the first write something else."""

        def __init__(self) -> None:
            self.timed = 0

        def __call__(self, run: Run) -> float:
            run().add_(self.timed)
            self.timed += 1
            return 1.0 / self.timed

    chooser = Autotuner(Recording())
    candidates = {name: lambda: torch.ones(2) for name in ("one by one", "dependent")}
    assert chooser.choose("step", candidates, tolerance=0.0) == "one by one"
    refused = {"dependent": "its result differs when it is replayed"}
    assert chooser.choices[0].refused == refused
    assert chooser.choose("product", candidates) == "dependent", (
        "parts of a product may be rounded in another order"
    )


# The weights' first part, which no step writes.
WEIGHTS_READ = "raw = tl.load"


def kernels() -> dict[str, ast.FunctionDef]:
    """All kernels that can start before the previous one has ended."""
    found: dict[str, ast.FunctionDef] = {}
    for file in Path(dependent_launch.__file__).parent.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found[node.name] = node
    return {
        name: node
        for name, node in found.items()
        if "DEPENDENT" in [one.arg for one in node.args.args]
    }


@pytest.mark.parametrize("name", kernels())
def test_a_kernel_always_waits_before_it_accesses_memory(name: str) -> None:
    """The compiled code is checked in test_triton_compile, for fewer kernels."""
    body = kernels()[name].body
    wait = [ast.unparse(one) for one in body].index("await_earlier(DEPENDENT)")
    for statement in body[:wait]:
        source = ast.unparse(statement)
        prefetches = source.startswith("if DEPENDENT > 0") and "prefetch" in source
        assert prefetches or isinstance(statement, ast.Assign | ast.Expr | ast.AnnAssign), source
        assert "tl.load" not in source.removeprefix(WEIGHTS_READ)
        assert "tl.store" not in source and "atomic" not in source


def test_whole_steps_may_multiply_by_this_projects_kernels_alone(
    runner: ModelRunner, launch_modes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where cuBLAS multiplies faster: its kernels do not overlap."""
    monkeypatch.setattr(steps, "FEWER_CANDIDATES", (steps.ONE_BY_ONE,))
    ops = runner._placed.ops
    assert isinstance(ops, TritonOps)
    for tuned in ops.products.shapes.values():
        tuned.own[ROW_BOUNDS.index(8)] = SmallBatchLaunch(64, 32, 1, 4, 3)
    config = engine_config(Path(runner._config.model), max_num_seqs=3)
    chooser = Autotuner(LastWins(), budget=1e9)
    measure(runner, config, 1, chooser)
    assert len(chooser.choices) == 1, "one row has no other kernel"
    measure(runner, config, 16, chooser)
    _, fastest, own, both = chooser.choices
    assert own.kernel == f"{fastest.kernel}, own products"
    assert (own.chosen, both.chosen) == ("early", "own products")
    assert not own.refused and not both.refused
    assert ops.dependent_launches.chosen(16) == StepLaunch(EARLY, own_products=True)
