"""Measures the unused slots in the last blocks of sequences, by the lengths of prompts and outputs.

    python benchmarks/kv_waste.py [--requests 200] [--block-size 16]

The engine's scheduler runs requests, up to 32 at once; slots are counted and nothing is computed.
Lengths are drawn evenly, on a logarithmic scale, with a fixed seed. Prints a Markdown table with
the unused slots divided by the used ones, over all steps: metric `headrace.engine.kv.waste`.
"""

import argparse
import math
import random

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.outputs import SampledToken
from headrace_engine.core.request import EngineRequest
from headrace_engine.core.step_plan import StepResult
from headrace_engine.scheduler.input_validation import Limits
from headrace_engine.scheduler.policies import Fcfs
from headrace_engine.scheduler.scheduler import Scheduler

Lengths = tuple[int, int]

# The ranges of prompt and of output lengths.
WORKLOADS: tuple[tuple[Lengths, Lengths], ...] = (
    ((16, 120), (16, 120)),
    ((16, 120), (50, 400)),
    ((32, 1448), (50, 400)),
    ((500, 4000), (50, 400)),
)


def waste(prompts: Lengths, outputs: Lengths, requests: int, block_size: int) -> float:
    draw = random.Random(5)

    def length(lengths: Lengths) -> int:
        low, high = lengths
        return round(low * math.pow(high / low, draw.random()))

    scheduler = Scheduler(
        EngineConfig(model="none", max_num_seqs=32),
        Limits(
            num_blocks=32 * (prompts[1] + outputs[1]) // block_size + 64,
            block_size=block_size,
            max_model_len=prompts[1] + outputs[1],
            vocab_size=requests + 1,
            eos_token_ids=frozenset(),
        ),
        Fcfs(),
    )
    for number in range(requests):
        scheduler.add(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=(number,) * length(prompts),
                params=SamplingParams(max_tokens=length(outputs), ignore_eos=True),
                seed=0,
            )
        )
    used = unused = 0
    while (scheduler_output := scheduler.schedule()) is not None:
        tokens = ((SampledToken(0),),) * sum(item.samples for item in scheduler_output.scheduled)
        scheduler.update(scheduler_output, StepResult(tokens))
        stats = scheduler.stats()
        used += stats.kv_slots_used
        unused += stats.kv_slots_unused
    return unused / used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--block-size", type=int, default=16)
    options = parser.parse_args()
    print("| prompt tokens | output tokens | unused slots |")
    print("| --- | --- | --- |")
    for prompts, outputs in WORKLOADS:
        share = waste(prompts, outputs, options.requests, options.block_size)
        print(f"| {_written(prompts)} | {_written(outputs)} | {share:.1%} |", flush=True)


def _written(lengths: Lengths) -> str:
    return f"{lengths[0]:,} to {lengths[1]:,}"


if __name__ == "__main__":
    main()
