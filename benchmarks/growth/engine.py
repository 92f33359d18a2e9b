"""Curves of one engine on this CPU: the time of a step, and of planning it."""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_benchmark.adapters import write_adapters
from gpu_benchmark.engine import Bench
from gpu_benchmark.shapes import Shape
from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.outputs import SampledToken
from headrace_engine.core.request import EngineRequest
from headrace_engine.core.step_plan import SchedulerOutput, StepResult
from headrace_engine.scheduler.input_validation import Limits
from headrace_engine.scheduler.policies import make_policy
from headrace_engine.scheduler.scheduler import Scheduler

from .curve import Curve, up_to

BLOCK = 16
STEPS = 24
PLANS = 40
RUNNING = 64  # sequences whose steps are planned while others wait
PLAN_LIMIT_US = 100.0
TOKEN = (SampledToken(7),)


def shape(context: int) -> Shape:
    """A Llama of 42 million parameters, whose keys and values take 4 kB a token."""
    return Shape(512, 1536, 8, 8, 2, 64, 32_000, context)


class GrowingBench(Bench):
    """An engine whose prompts are not computed: their keys and values are zeros, and decoding takes
    as long as after any others."""

    def __init__(self, folder: Path, context: int, batch: int, **options: Any) -> None:
        blocks = max(context, batch * 512) // BLOCK + batch + 8
        super().__init__(
            folder, shape(context + 64), "cpu", max_num_seqs=batch, max_num_batched_tokens=8192,
            num_blocks=blocks, block_size=BLOCK, **options,
        )  # fmt: skip

    def step_ms(
        self, batch: int, context: int, adapters: tuple[str | None, ...] = (None,)
    ) -> float:
        """The median time of a decode step of `batch` sequences with `context` keys each."""
        runner: Any = self.runner
        execute, runner.execute = runner.execute, computed
        try:
            self.decoding(batch, context, STEPS + 4, adapters)
        finally:
            runner.execute = execute
        self.step_seconds(4)
        found = statistics.median(self.step_seconds(STEPS))
        self.abort()
        return 1e3 * found


def computed(plan: SchedulerOutput) -> StepResult:
    """The result of a step that was not computed: the same token for each sequence."""
    return StepResult((TOKEN,) * sum(item.samples for item in plan.scheduled))


def steps(most: int, _seconds: float) -> Iterator[Curve]:
    """Step time over batch, context and adapters."""
    batches, contexts = (
        up_to(most, [1, 4, 16, 64, 256]),
        up_to(most, [1024, 4096, 16_384, 65_536, 131_072]),
    )
    with tempfile.TemporaryDirectory() as folder:
        bench = GrowingBench(Path(folder), contexts[-1], batches[-1])
        curve = Curve("step, by batch", "sequences of 256 keys", "step", "ms")
        for batch in batches:
            curve.add(batch, bench.step_ms(batch, 256))
        yield curve
        curve = Curve("step, by context", "keys of one sequence", "step", "ms")
        for context in contexts:
            curve.add(context, bench.step_ms(1, context))
        yield curve
    counts = up_to(most, [1, 2, 4, 8, 16, 32])
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        names = write_adapters(place, shape(1024), counts[-1], 8)
        bench = GrowingBench(
            place / "model", 1024, counts[-1], enable_lora=True, lora_modules=names,
            max_loras=counts[-1], max_lora_rank=8,
        )  # fmt: skip
        curve = Curve("step, by adapters", f"adapters of {counts[-1]} sequences", "step", "ms")
        for count in counts:
            chosen = tuple(names)[:count]
            curve.add(count, bench.step_ms(counts[-1], 256, chosen))
        yield curve


def plans(most: int, _seconds: float) -> Iterator[Curve]:
    """CPU time of planning a step of 64 sequences, over the requests that wait."""
    curve = Curve(
        "plan, by waiting requests", "waiting requests", f"plan of {RUNNING} sequences", "µs",
        PLAN_LIMIT_US,
    )  # fmt: skip
    config = EngineConfig(model="none", max_num_seqs=RUNNING, max_num_batched_tokens=8192)
    limits = Limits(
        num_blocks=8 * RUNNING, block_size=128, max_model_len=1024, vocab_size=32_000,
        eos_token_ids=frozenset(),
    )  # fmt: skip
    scheduler = Scheduler(config, limits, make_policy(config.policy, config.policy_options))
    made = 0
    for waiting in up_to(most, [1, 1000, 10_000, 100_000, 1_000_000]):
        while made < waiting + RUNNING:
            scheduler.add(_request(made))
            made += 1
        if curve.points == []:
            _step(scheduler)  # starts the sequences that run
        curve.add(waiting, statistics.median(_plan_us(scheduler)))
    yield curve


def _request(number: int) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    return EngineRequest(
        request_id=str(number), prompt_token_ids=(5, 6, 7, 8), params=params, seed=0
    )


def _plan_us(scheduler: Scheduler) -> list[float]:
    return [_step(scheduler) for _ in range(PLANS)]


def _step(scheduler: Scheduler) -> float:
    """Plans and ends a step; returns the plan's CPU microseconds."""
    begun = time.thread_time_ns()
    plan = scheduler.schedule()
    took = (time.thread_time_ns() - begun) / 1e3
    assert plan is not None
    scheduler.update(plan, computed(plan))
    return took
