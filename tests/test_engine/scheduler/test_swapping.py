"""Swapping of KV to host memory: what is copied, when sequences come back, and what is counted.

The fake runner makes the copies and checks each position in each step. The test of the real copies
runs a model on the CPU, whose host pool is ordinary memory.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.errors import ConfigError
from headrace_engine.core.request import EngineRequest, Sequence, State
from headrace_engine.core.step_cost import PrefillDecodeCosts
from headrace_engine.core.step_plan import SchedulerOutput
from headrace_engine.engine.engine import Engine
from headrace_engine.kv_cache.host_block_tables import HostBlockTables, Moves
from headrace_engine.kv_cache.kv_cache_manager import KVCacheManager
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.scheduler.copy_costs import CopyCosts
from headrace_engine.scheduler.policies import make_policy
from headrace_testing.engine import Rig, make_config, make_request, make_rig

CheckpointMaker = Callable[[str], Path]
CHEAP, DEAR = 0.01, 100.0


def params(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)


def swapping_rig(
    num_blocks: int, *, host: int = 64, block_seconds: float = CHEAP, caching: bool = False
) -> Rig:
    """Prompt tokens take a second each, so that `block_seconds` decides."""
    return make_rig(
        make_config(enable_prefix_caching=caching),
        num_blocks=num_blocks,
        num_host_blocks=host,
        prompt_seconds=1.0,
        block_seconds=block_seconds,
    )


def runs_of(rig: Rig, request_id: str) -> list[tuple[int, int]]:
    return [
        (item.start, item.length)
        for scheduler_output in rig.runner.steps
        for item in scheduler_output.scheduled
        if item.sequence.request.request_id == request_id
    ]


@pytest.mark.parametrize("caching", [False, True])
def test_a_swapped_sequence_continues_where_it_was(caching: bool) -> None:
    rig = swapping_rig(6, caching=caching)
    requests = [make_request(name, [k] * 8, params=params(12)) for k, name in enumerate("ab", 1)]
    rig.add(*requests)
    rig.finish()
    stats = rig.scheduler.stats()
    assert stats.swaps > 0 and stats.preemptions == 0
    assert sum(length for _, length in runs_of(rig, "b")) == 8 + 11, "nothing was computed twice"
    assert rig.tokens() == rig.expected(*requests)


def test_sequences_cheaper_to_recompute_are_not_swapped() -> None:
    rig = swapping_rig(6, block_seconds=DEAR)
    requests = [make_request(name, [k] * 8, params=params(12)) for k, name in enumerate("ab", 1)]
    rig.add(*requests)
    rig.finish()
    first = rig.scheduler.stats()
    assert first.swaps == 1, "once, to see what it costs"
    again = [make_request(name, [k] * 8, params=params(12)) for k, name in enumerate("cd", 3)]
    rig.add(*again)
    rig.finish()
    stats = rig.scheduler.stats()
    assert stats.swaps == 1 and stats.preemptions > first.preemptions
    assert rig.tokens() == rig.expected(*requests, *again)


def test_without_host_blocks_a_sequence_is_recomputed() -> None:
    rig = swapping_rig(6, host=1)
    requests = [make_request(name, [k] * 8, params=params(12)) for k, name in enumerate("ab", 1)]
    rig.add(*requests)
    rig.finish()
    stats = rig.scheduler.stats()
    assert (stats.swaps, stats.host_blocks_used) == (0, 0)
    assert stats.preemptions > 0
    assert rig.tokens() == rig.expected(*requests)


def test_a_swapped_sequence_comes_back_before_anything_new_starts() -> None:
    rig = swapping_rig(6)
    first = [make_request(name, [k] * 8, params=params(12)) for k, name in enumerate("ab", 1)]
    rig.add(*first)
    while rig.scheduler.stats().swapped == 0:
        rig.step()
    small = make_request("c", [9], params=params(2), arrival=-5.0)
    rig.add(small)
    rig.finish()
    order = [name for scheduler_output in rig.runner.steps for name in names(scheduler_output)]
    back = len(order) - order[::-1].index("a")
    assert order[back] == "b" and "c" not in order[:back]
    assert rig.tokens() == rig.expected(*first, small)


def names(scheduler_output: SchedulerOutput) -> list[str]:
    return [item.sequence.request.request_id for item in scheduler_output.scheduled]


def test_a_sequence_comes_back_only_with_room_to_grow() -> None:
    rig = swapping_rig(8)
    for k, name in enumerate("abc", 1):
        rig.add(make_request(name, [k] * 4, params=params(24), arrival=float(k)))
    while rig.scheduler.has_work:
        rig.step()
        scheduler_output = rig.runner.steps[-1]
        if scheduler_output.swap_in:
            assert not scheduler_output.swap_out
            free = rig.scheduler.kv_cache.pool.num_free
            assert free >= 1 or rig.scheduler.stats().running == 1
    assert rig.scheduler.stats().swaps < 10, "it thrashes"


def test_an_aborted_sequence_gives_its_host_blocks_back() -> None:
    rig = swapping_rig(6)
    rig.add(*(make_request(name, [k] * 8, params=params(12)) for k, name in enumerate("ab", 1)))
    while rig.scheduler.stats().swapped == 0:
        rig.step()
    stats = rig.scheduler.stats()
    assert stats.host_blocks_used > 0 and stats.host_blocks_free < 64
    rig.scheduler.abort("b")
    stats = rig.scheduler.stats()
    assert (stats.swapped, stats.host_blocks_used, stats.host_blocks_free) == (0, 0, 64)


def test_copied_bytes_are_counted() -> None:
    rig = swapping_rig(6)
    rig.add(*(make_request(name, [k] * 8, params=params(12)) for k, name in enumerate("ab", 1)))
    rig.finish()
    stats = rig.scheduler.stats()
    moved = [
        (len(scheduler_output.swap_out), len(scheduler_output.swap_in))
        for scheduler_output in rig.runner.steps
    ]
    assert stats.swap_out_bytes == 1000 * sum(out for out, _ in moved) > 0
    assert stats.swap_in_bytes == 1000 * sum(back for _, back in moved) > 0


def test_choices_that_share_a_prompt_share_its_host_blocks() -> None:
    rig = swapping_rig(9)
    early = make_request("early", [9] * 4, params=params(28))
    late = make_request("late", range(1, 13), params=params(8, n=3), arrival=1.0)
    rig.add(early, late)
    rig.step(2)
    while rig.scheduler.stats().swapped < 2:
        rig.step()
    swapped = list(rig.scheduler.swapped())
    prompts = [sequence.host_blocks[:3] for sequence in swapped]
    assert prompts[0] == prompts[1]
    rig.finish()
    assert rig.tokens() == rig.expected(early, late)


def test_a_prefill_that_is_swapped_out_is_not_begun_again() -> None:
    rig = make_rig(
        make_config(max_num_batched_tokens=3, enable_prefix_caching=False),
        num_blocks=10,
        num_host_blocks=64,
        prompt_seconds=1.0,
        block_seconds=CHEAP,
    )
    early = make_request("early", range(1, 12), params=params(25), arrival=1.0)
    late = make_request("late", range(20, 44), params=params(4), arrival=9.0)
    rig.add(early)
    rig.step(4)
    rig.add(late)
    rig.finish()
    assert rig.scheduler.stats().swaps > 0
    assert sum(length for _, length in runs_of(rig, "late")) == 24 + 3
    assert rig.tokens() == rig.expected(late, early)


def test_a_request_of_higher_priority_swaps_out_the_preempted_one() -> None:
    rig = make_rig(
        make_config(),
        num_blocks=6,
        num_host_blocks=64,
        prompt_seconds=1.0,
        block_seconds=CHEAP,
        policy=make_policy("priority", {}),
    )
    slow = make_request("slow", [1] * 16, params=params(6), priority=1)
    urgent = make_request("urgent", [2] * 12, params=params(4), priority=-1, arrival=1.0)
    rig.add(slow)
    rig.step(2)
    rig.add(urgent)
    rig.step()
    assert rig.shape() == [("urgent", 0, 12)]
    assert rig.scheduler.stats().swapped == 1
    rig.finish()
    assert sum(length for _, length in runs_of(rig, "slow")) == 16 + 5
    assert rig.tokens() == rig.expected(slow, urgent)


def costs_after(*steps: tuple[int, int, float, float]) -> CopyCosts:
    """The costs after steps of (prompt tokens, moved blocks, total seconds, seconds of copying)."""
    computing = PrefillDecodeCosts()
    costs = CopyCosts(computing)
    for prompt, moved, seconds, swap in steps:
        computing.observe(0 if prompt else 1, prompt, seconds - swap)
        costs.observe(moved, swap)
    return costs


PROMPT = (100, 0, 1.0, 0.0)
COPIES = (0, 10, 1.0, 1.0)


def test_costs_follow_the_observed_times() -> None:
    nothing = costs_after()
    assert not nothing.swap_is_cheaper(1, 100), "no prompt token was timed"
    assert costs_after(PROMPT).swap_is_cheaper(7, 100), "not tried yet"
    costs = costs_after(PROMPT, COPIES)
    # 7 blocks out and in take 1.4 s; 100 tokens take 1 s.
    assert not costs.swap_is_cheaper(7, 100)
    assert costs.swap_is_cheaper(7, 200)


def test_an_expensive_swap_is_tried_again_later() -> None:
    costs = costs_after(PROMPT, COPIES)
    tried = [costs.swap_is_cheaper(7, 100) for _ in range(10)]
    assert tried[0] is False and tried[-1] is True


def test_swapped_kv_comes_back_as_it_was(checkpoint: CheckpointMaker) -> None:
    folder = checkpoint("llama")
    plain = generate(folder, num_blocks=64, swap_space=0.0)
    assert generate(folder, num_blocks=6, swap_space=0.001) == plain


def generate(folder: Path, *, num_blocks: int, swap_space: float) -> dict[str, list[int]]:
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        block_size=4,
        num_blocks=num_blocks,
        max_model_len=24,
        swap_space=swap_space,
        enable_prefix_caching=False,
    )
    engine = Engine(config, ModelRunner(config))
    tokens: dict[str, list[int]] = {}
    for name in "abc":
        prompt = tuple(ord(name) % 50 + index for index in range(8))
        engine.add_request(
            EngineRequest(request_id=name, prompt_token_ids=prompt, params=greedy(), seed=1)
        )
        tokens[name] = []
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    stats = engine.stats()
    assert bool(stats.swaps) == bool(swap_space), "the test should swap"
    assert stats.swap_in_bytes == stats.swap_out_bytes
    return tokens


def greedy() -> SamplingParams:
    return SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def test_swap_space_must_hold_a_block(checkpoint: CheckpointMaker) -> None:
    config = EngineConfig(
        model=str(checkpoint("llama")), num_blocks=16, max_model_len=16, swap_space=1e-9
    )
    with pytest.raises(ConfigError, match="swap_space"):
        ModelRunner(config)
    with pytest.raises(ConfigError, match="swap_space"):
        EngineConfig(model="any", swap_space=-1.0)


def test_state_says_where_the_kv_is() -> None:
    rig = swapping_rig(6)
    rig.add(*(make_request(name, [k] * 8, params=params(12)) for k, name in enumerate("ab", 1)))
    while rig.scheduler.stats().swapped == 0:
        rig.step()
    (swapped,) = rig.scheduler.swapped()
    assert swapped.state is State.SWAPPED
    assert not swapped.block_table and len(swapped.host_blocks) == -(
        -swapped.num_computed_tokens // 4
    )


def test_a_step_does_not_swap_out_over_blocks_that_it_swaps_in() -> None:
    kv = KVCacheManager(8, 4, prefix_caching=False)
    host = HostBlockTables(2, kv)
    first, second = computed_sequence(kv, "a", 8), computed_sequence(kv, "b", 8)
    outs: Moves = []
    host.swap_out(first, outs)
    kv.free(first)
    first.num_computed_tokens = 8
    assert not host.fits(second)
    ins: Moves = []
    host.swap_in(first, [], ins)
    assert [source for source, _ in ins] == [to for _, to in outs]
    assert not host.fits(second), "the step that is planned still reads them"
    host.settle()
    assert host.fits(second)


def computed_sequence(kv: KVCacheManager, name: str, length: int) -> Sequence:
    tokens = [ord(name)] * length
    sequence = Sequence(make_request(name, tokens), 0, tokens)
    kv.extend(sequence, length, [])
    sequence.num_computed_tokens = length
    return sequence
