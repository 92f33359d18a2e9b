"""Measures the unused part of allocated blocks on a mixed workload, without a model."""

import random

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.outputs import SampledToken
from headrace_engine.core.step_plan import StepResult
from headrace_engine.scheduler.input_validation import Limits
from headrace_engine.scheduler.policies import Fcfs
from headrace_engine.scheduler.scheduler import Scheduler
from headrace_testing.engine import make_config, make_request

BLOCK = 16


def mixed_workload(count: int) -> Scheduler:
    limits = Limits(
        num_blocks=2500,
        block_size=BLOCK,
        max_model_len=4096,
        vocab_size=100,
        eos_token_ids=frozenset({0}),
    )
    config = make_config(max_num_seqs=32, max_num_batched_tokens=512, watermark=0.01)
    scheduler = Scheduler(config, limits, Fcfs())
    draw = random.Random(5)
    for number in range(count):
        prompt = [number % 90 + 1] * int(2 ** draw.uniform(5, 10.5))
        params = SamplingParams(
            max_tokens=draw.randint(50, 400), n=draw.choice([1, 1, 1, 3]), ignore_eos=True
        )
        scheduler.add(make_request(str(number), prompt, params=params))
    return scheduler


def test_less_than_four_percent_of_the_used_slots_is_wasted() -> None:
    scheduler = mixed_workload(60)
    used = unused = 0
    while (scheduler_output := scheduler.schedule()) is not None:
        tokens = ((SampledToken(5),),) * sum(item.samples for item in scheduler_output.scheduled)
        scheduler.update(scheduler_output, StepResult(tokens))
        stats = scheduler.stats()
        assert stats.kv_slots_used + stats.kv_slots_unused == BLOCK * stats.blocks_used
        used += stats.kv_slots_used
        unused += stats.kv_slots_unused
    assert 0.005 < unused / used < 0.04


def test_waste_is_the_slots_after_the_last_tokens() -> None:
    scheduler = mixed_workload(8)
    for _ in range(40):
        scheduler_output = scheduler.schedule()
        assert scheduler_output is not None
        tokens = ((SampledToken(5),),) * sum(item.samples for item in scheduler_output.scheduled)
        scheduler.update(scheduler_output, StepResult(tokens))
    filled = {
        (block, offset)
        for sequence in scheduler.running()
        for place, block in enumerate(sequence.block_table)
        for offset in range(min(BLOCK, sequence.num_computed_tokens - BLOCK * place))
    }
    stats = scheduler.stats()
    assert stats.kv_slots_used == len(filled)
    assert stats.kv_waste == stats.kv_slots_unused / len(filled)
