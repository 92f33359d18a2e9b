"""Measures the savings of models that alternate layers with and without a sliding window, by block
tables for each kind of layers: KV memory of a long sequence, and how many of them a pool holds.

    python benchmarks/windows.py [--context 32768] [--sequences 8]

The engine's scheduler runs requests of a context's length, an eighth of it output, for models of
published shapes. It runs them with one table for all layers and with groups of layers, over the
same memory: as much as `sequences` take with one table. Blocks are counted and nothing is computed.
Prints a Markdown table.
"""

import argparse
from dataclasses import dataclass

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.kv_cache_groups import KVLayout
from headrace_engine.core.outputs import SampledToken
from headrace_engine.core.request import EngineRequest
from headrace_engine.core.step_plan import StepResult
from headrace_engine.scheduler.input_validation import Limits
from headrace_engine.scheduler.policies import Fcfs
from headrace_engine.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Each `every`-th layer sees all keys, the others `window`."""

    name: str
    layers: int
    every: int
    window: int

    def layout(self, hybrid: bool) -> KVLayout:
        windows = [
            None if (layer + 1) % self.every == 0 else self.window for layer in range(self.layers)
        ]
        return KVLayout.of(windows, hybrid=hybrid)


SHAPES = (
    Shape("Gemma-2 9B", 42, 2, 4096),
    Shape("Gemma-3 1B", 26, 6, 512),
    Shape("Gemma-3 27B", 62, 6, 1024),
    Shape("gpt-oss-20b", 24, 2, 128),
)


@dataclass(frozen=True, slots=True)
class Count:
    """Blocks in use at the end and at the `peak`, counted per layer, and the maximal number of
    sequences `running` at once."""

    blocks: int
    peak: int
    running: int


def run(layout: KVLayout, num_blocks: int, context: int, requests: int) -> Count:
    """Runs as many requests as fit at once."""
    config = EngineConfig(model="none", max_num_seqs=requests, enable_prefix_caching=False)
    limits = Limits(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=context,
        vocab_size=2,
        eos_token_ids=frozenset(),
        kv_groups=layout.groups,
    )
    scheduler = Scheduler(config, limits, Fcfs())
    output = context // 8
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    prompt = (1,) * (context - output)
    for number in range(requests):
        scheduler.add(
            EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params, seed=0)
        )
    peak = last = running = 0
    places = len(layout.layer_of_each_place)
    while (scheduler_output := scheduler.schedule()) is not None:
        used = scheduler.kv_cache.pool.num_used * places
        sampling = sum(item.samples for item in scheduler_output.scheduled)
        result = StepResult(((SampledToken(1),),) * sampling)
        peak, last = max(peak, used), used
        running = max(running, scheduler.stats().running)
        scheduler.update(scheduler_output, result)
    return Count(last, peak, running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--sequences", type=int, default=8)
    options = parser.parse_args()
    context, sequences = options.context, options.sequences
    print("| model | tables | KV of one, at its end | at most | run together |")
    print("| --- | --- | --- | --- | --- |")
    rows = -(-context // BLOCK_SIZE)
    kept_free = EngineConfig(model="none").watermark
    for shape in SHAPES:
        whole = rows * shape.layers
        for layout in (shape.layout(False), shape.layout(True)):
            num_blocks = (
                int(whole * sequences / (1 - kept_free)) // len(layout.layer_of_each_place) + 1
            )
            alone = run(layout, num_blocks, context, 1)
            running = run(layout, num_blocks, context, 8 * sequences).running
            print(
                f"| {shape.name} | {layout.groups.count} | {alone.blocks / whole:.1%} "
                f"| {alone.peak / whole:.1%} | {running} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
