"""Kernels chosen by timing: those that are clearly faster, correct and reproducible; choices kept
between processes; the default whenever there is a doubt. Times are given by the tests, not
measured.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_engine import SamplingParams, attention
from headrace_engine.attention.triton import TritonBackend
from headrace_engine.autotune import adapters as tuned_adapters
from headrace_engine.autotune import attention as tuned_attention
from headrace_engine.autotune import autotuner, start
from headrace_engine.autotune import layers as tuned_layers
from headrace_engine.autotune.adapters import AdapterTuning
from headrace_engine.autotune.autotuner import Autotuner, Choice, Run
from headrace_engine.autotune.experts import tune_experts
from headrace_engine.autotune.table import ChoiceTable
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.errors import ConfigError
from headrace_engine.core.kv_cache_groups import ONE_GROUP
from headrace_engine.engine.engine import Engine
from headrace_engine.kernels.triton import launch as launches
from headrace_engine.lora.batch import LoRALimits
from headrace_engine.lora.shapes import LinearName, LinearShape, linear_shape
from headrace_engine.lora.tiles import TiledProducts
from headrace_engine.model_loader import loader
from headrace_engine.models.placed_model import PlacedModel
from headrace_engine.operators.base import Ops, TorchOps
from headrace_engine.operators.triton import TritonOps
from headrace_engine.operators.triton_experts import GroupedMoe
from headrace_engine.operators.tuned_experts import Mixtures
from headrace_testing.engines import Output, engine_config, make_runner, request, run
from headrace_testing.mixtures import Mixture
from headrace_testing.timers import LastWins

VERSIONS = {"torch": "2.11", "triton": "3.6"}


class Stopwatch:
    """Returns the given time for each measured run."""

    def __init__(self, seconds: Mapping[Run, float]) -> None:
        self._seconds = seconds

    def __call__(self, run: Run) -> float:
        run()
        return self._seconds[run]


def given(number: float) -> Run:
    return lambda: torch.full((4,), number)


def failing() -> torch.Tensor:
    raise RuntimeError("out of resource: shared memory")


def moving() -> Run:
    numbers = iter(range(1000))
    return lambda: torch.full((4,), 1.0 + next(numbers) * 1e-6)


FIRST, EQUAL, WRONG, MOVING = given(1.0), given(1.001), given(1.1), moving()
SECONDS = {FIRST: 1.0, EQUAL: 0.5, WRONG: 0.1, MOVING: 0.1}


def tuner(seconds: Mapping[Run, float] = SECONDS, **options: Any) -> Autotuner:
    return Autotuner(Stopwatch(seconds), **options)


def test_the_fastest_correct_candidate_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    candidates = {
        "table": FIRST, "wrong": WRONG, "moving": MOVING, "failing": failing, "equal": EQUAL,
    }  # fmt: skip
    chooser = tuner()
    with caplog.at_level(logging.INFO):
        assert chooser.choose("product", candidates) == "equal"
    (choice,) = chooser.choices
    assert choice.microseconds == {"table": 1e6, "equal": 0.5e6}
    assert choice.refused == {
        "wrong": "its result is 0.1 off",
        "moving": "its result differs from run to run",
        "failing": "RuntimeError: out of resource: shared memory",
    }
    (line,) = caplog.records
    assert line.__dict__["kernel"] == "product" and line.__dict__["chosen"] == "equal"


def test_a_candidate_that_is_hardly_faster_is_not_chosen() -> None:
    assert tuner({FIRST: 1.0, EQUAL: 0.985}).choose("x", {"a": FIRST, "b": EQUAL}) == "a"
    assert tuner({FIRST: 1.0, EQUAL: 0.975}).choose("x", {"a": FIRST, "b": EQUAL}) == "b"
    nothing = given(float("nan"))
    assert tuner({FIRST: 1.0, nothing: 0.1}).choose("x", {"a": FIRST, "b": nothing}) == "a"


def test_a_default_that_does_not_work_is_replaced() -> None:
    assert tuner().choose("x", {"a": failing, "b": EQUAL}) == "b"
    assert tuner().choose("x", {"a": failing}) == "a"


def test_after_the_time_limit_defaults_are_used() -> None:
    now = iter([0.0, 1.0, 2.5, 4.0, 5.0])
    chooser = tuner(budget=3.0, clock=lambda: next(now))
    assert chooser.choose("x", {"a": FIRST, "b": EQUAL}) == "b"
    assert chooser.choose("y", {"a": FIRST, "b": EQUAL}) == "a"
    assert set(chooser.choices[1].refused.values()) == {"no time was left"}


def test_known_choices_are_not_measured_again() -> None:
    chooser = tuner({}, known={"x": "b", "y": "gone"})
    assert chooser.choose("x", {"a": FIRST, "b": EQUAL}) == "b" and not chooser.measured
    known = tuner(known={"y": "gone"})
    assert known.choose("y", {"a": FIRST, "b": EQUAL}) == "b" and known.measured


def test_choices_are_kept_for_a_device_and_its_versions(tmp_path: Path) -> None:
    table = ChoiceTable(tmp_path / "tuned", "NVIDIA H100 80GB", VERSIONS)
    assert table.read() == {}
    table.write([Choice("x", "b", {"a": 2.0, "b": 1.0}), Choice("unmeasured", "a")])
    table.write([Choice("y", "a", {"a": 1.0}, {"b": "its result is 1 off"})])
    # which is continued later
    table.write([Choice("z", "a", {"a": 1.0}, {"b": "no time was left"})])
    assert table.file.name == "NVIDIA_H100_80GB.json"
    assert [one.name for one in table.file.parent.iterdir()] == [table.file.name]
    assert table.read() == {"x": "b", "y": "a"}
    other = ChoiceTable(tmp_path / "tuned", "NVIDIA H100 80GB", {**VERSIONS, "triton": "3.7"})
    assert other.read() == {}
    other.write([Choice("x", "a", {"a": 1.0})])
    assert other.read() == {"x": "a"} and table.read() == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"kernels": {"x": {}}}'])
def test_a_file_that_is_not_a_table_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "cpu.json").write_text(text)
    with pytest.raises(ConfigError, match=r"cpu\.json is .*: remove it"):
        ChoiceTable(tmp_path, "cpu", {}).read()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates that fit a tiny model."""
    tiles = (launches.SmallBatchLaunch(64, 32, 1, 4, 3),)
    for name, value in {
        "SMALL_BATCH_TILES": tiles, "SILU_TILES": tiles, "SPLITS": (1, 2), "FEWEST_PROGRAMS": 1,
        "DECODE_TILES": ((16, 4, 3),),
        "PREFILL_TILES": (launches.Launch(16, 16, 4, 3),),
    }.items():  # fmt: skip
        monkeypatch.setattr(launches, name, value)
    for name, size in {
        "MOST_ROTATIONS": 1, "PREFILL_TOKENS": 4, "DECODE_CONTEXT": 40,
    }.items():  # fmt: skip
        monkeypatch.setattr(tuned_attention, name, size)
    monkeypatch.setattr(start, "POOL_BYTES", 1 << 16)
    monkeypatch.setattr(autotuner, "REPEATS", 1)
    monkeypatch.setattr(tuned_layers, "ROTATED_BYTES", 1)


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runners whose steps go through Triton, as on a CUDA device."""
    monkeypatch.setattr(attention, "select", lambda *_: TritonBackend((9, 0)))
    monkeypatch.setattr(loader, "make_ops", lambda *_: TritonOps())
    return make_runner


def test_tuning_does_not_change_the_results_of_a_model(
    checkpoint: Any, small: None, on_triton: Callable[..., Any]
) -> None:
    folder = checkpoint("qwen3")
    options = {"dtype": "bfloat16", "attention_backend": "auto", "num_blocks": 32, "block_size": 16}
    config = replace(engine_config(folder, **options), max_num_seqs=1)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2, logprobs=1)
    work = [request("0", range(3, 12), params)]
    outputs, runner = [], None
    for tunes in (False, True):
        runner = on_triton(folder, **options)
        if tunes:
            chooser = Autotuner(LastWins(), budget=1e9)
            with torch.inference_mode():
                start.tune_with(chooser, runner._placed, config)
            changed = [one for one in chooser.choices if one.chosen != next(iter(one.microseconds))]
            assert not any(one.refused for one in chooser.choices)
            # Four shapes of products and one with its activation; parts, merging, tiles, prefill.
            assert len(changed) == len(chooser.choices) == 5 + 4
        outputs.append(run(Engine(config, runner), work))
    plain, tuned = ([logprob(one) for one in outputs_of.values()] for outputs_of in outputs)
    assert tuned == pytest.approx(plain, abs=0.05)


def logprob(output: Output) -> float:
    """The log probability of the first token; rounding may change the most probable one."""
    return output.logprobs[0].logprob


def placed(ops: Ops, device: str) -> PlacedModel:
    model: Any = None
    where = torch.device(device)
    return PlacedModel(
        model,
        TritonBackend((9, 0)),
        ops,
        where,
        torch.bfloat16,
        frozenset(),
        max_model_len=1,
        layout=ONE_GROUP,
    )


def test_kernels_are_measured_where_steps_are_recorded_and_may_differ() -> None:
    config = EngineConfig(model="any")
    for ops, device, wanted in (
        (TritonOps(), "cuda", True), (TorchOps(), "cuda", False), (TritonOps(), "cpu", False),
    ):  # fmt: skip
        assert loader._is_tuned(config, placed(ops, device)) is wanted
    for option in ({"enable_autotuner": False}, {"enforce_eager": True}, {"deterministic": True}):
        without = EngineConfig(model="any", **option)  # type: ignore[arg-type]
        assert not loader._is_tuned(without, placed(TritonOps(), "cuda"))


def test_later_engines_read_the_measurements_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str] = []

    def measure(tuner: Autotuner, *_: object) -> None:
        chosen.append(tuner.choose("product", {"a": FIRST, "b": EQUAL}))

    monkeypatch.setattr(start, "tune_with", measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    config = EngineConfig(model="any", tuned_config_folder=str(tmp_path))
    for seconds in ({FIRST: 1.0, EQUAL: 0.5}, {}):
        monkeypatch.setattr(start, "CudaTimer", lambda seconds=seconds: Stopwatch(seconds))
        start.tune(placed(TritonOps(), "cuda"), config)
    assert chosen == ["b", "b"]
    (file,) = tmp_path.iterdir()
    table = json.loads(file.read_text())
    assert file.name == "NVIDIA_H200.json"
    assert set(table["versions"]) == {"torch", "triton", "kernels"}
    assert table["kernels"]["product"]["microseconds"] == {"a": 1e6, "b": 0.5e6}


def test_experts_use_the_tiles_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = {16: (launches.LinearLaunch(16, 32, 32, 4, 3), launches.LinearLaunch(64, 32, 32, 4, 2))}
    monkeypatch.setattr(launches, "EXPERT_CANDIDATES", tiles)
    monkeypatch.setattr(autotuner, "REPEATS", 1)
    cpu = torch.device("cpu")
    mixture = Mixture(experts=4, per_token=1, hidden=32, inner=24, dtype=torch.bfloat16)
    mixtures = Mixtures()
    moe = GroupedMoe(mixture.parts(cpu), capability=(9, 0), mixtures=mixtures)
    chooser = Autotuner(LastWins(), budget=1e9)
    tune_experts(chooser, mixtures, 16, torch.empty(0, dtype=torch.bfloat16))
    assert not any(one.refused for one in chooser.choices)
    both, down = chooser.choices
    assert both.kernel.endswith("tokens 16, both") and both.chosen.startswith("64x32x32")
    assert down.kernel.endswith("tokens 16, down") and down.read_bytes > 0
    ((shape, tuned),) = mixtures.shapes.items()
    assert len(tuned.layers) == 1 and shape.read_bytes(1) == 3 * 32 * 24 * 2
    assert shape.read_bytes(1000) == pytest.approx(4 * shape.expert_bytes)
    launch = tuned.chosen(2)
    assert launch is not None and launch.up.rows == launch.down.rows == 64
    assert tuned.chosen(1) is tuned.chosen(17) is None  # for another number of tokens
    x = mixture.rows(9, cpu)
    bound = 4 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(moe(x), mixture.one_by_one(cpu)(x), rtol=bound, atol=bound)


def test_adapters_use_the_launches_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuner, "REPEATS", 1)
    monkeypatch.setattr(tuned_adapters, "ROTATED_BYTES", 20_000)
    layer: dict[LinearName, LinearShape] = {
        "qkv": linear_shape(520, {"q_proj": 32, "k_proj": 16, "v_proj": 16}, "self_attn"),
        "o": linear_shape(32, {"o_proj": 64}, "self_attn"),
    }
    ops, chooser = TritonOps(), Autotuner(LastWins(), budget=1e9)
    like = torch.empty(0, dtype=torch.bfloat16)
    adapters = AdapterTuning(ops, [layer] * 9, 2, 4, like)
    for rows in (3, 1):
        adapters.tune(chooser, rows)
    assert not any(one.refused for one in chooser.choices)
    assert [one.kernel[-6:] for one in chooser.choices] == ["rows 3", "rows 1"]
    alone, three = ops.lora_launches.few
    wanted = launches.lora_candidates(launches.lora_launch(2, 3))[-1]
    assert alone == (1, wanted) and three == (3, wanted)
    assert chooser.choices[0].read_bytes == 2 * chooser.choices[1].read_bytes
    made = ops.lora_products(
        LoRALimits(2, 40, 2), lambda arrays: list(map(torch.from_numpy, arrays))
    )
    assert isinstance(made, TiledProducts) and made.sizes == (1, 3, launches.LORA_NARROW + 1)
    assert made.launch(2) == wanted != made.launch(4) == launches.lora_launch(2, 4)


def test_the_measured_row_counts_depend_on_the_largest_step() -> None:
    bounds = (1, 16, 64)
    reached = [one for one in (*bounds, 4096) if start._is_reached(one, bounds, 16)]
    assert reached == [1, 16, 4096]


TOGETHER = """
import torch
import triton.language as tl
from triton.errors import TritonError
from headrace_engine.kernels.triton.jit import jit, only_compiling
from headrace_engine.autotune.compiling import compile_together
from headrace_testing.triton_target import compile_for

@jit
def some_kernel(x: tl.tensor, SIZE: tl.constexpr) -> None:
    tl.static_assert(SIZE > 0, "nothing to do")
    tl.store(x + tl.arange(0, SIZE), 0.0)

def launch(size: int) -> None:
    some_kernel[(1,)](torch.empty(64), SIZE=size)

compile_for(90)
compile_together([lambda size=size: launch(size) for size in (16, 0, 32, 16)])
((kernels, *_),) = some_kernel.device_caches.values()
print(sorted(type(one).__name__ for one in kernels.values()))
try:
    with only_compiling():
        launch(0)
except TritonError as error:
    print("nothing to do" in str(error))
"""


def test_candidates_are_compiled_together(tmp_path: Path) -> None:
    """Compiles in a process without the interpreter, for an absent device."""
    program = tmp_path / "program.py"
    program.write_text(TOGETHER)
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False
    )
    # A kernel that failed is not kept, and reports its error when it is launched.
    assert done.stdout.splitlines() == ["['CompiledKernel', 'CompiledKernel']", "True"], done.stderr


def test_a_kernel_is_prepared_with_all_its_candidates_while_there_is_time() -> None:
    prepared: list[int] = []

    def prepare(runs: Iterable[Run]) -> None:
        prepared.append(len(list(runs)))

    now = iter([0.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0])
    chooser = tuner(budget=3.0, clock=lambda: next(now), prepare=prepare)
    for kernel in ("x", "y"):
        chooser.choose(kernel, {"a": FIRST, "b": EQUAL})
    assert prepared == [2] and set(chooser.choices[1].refused.values()) == {"no time was left"}
