"""Models whose layers all have a window give back the blocks that left it, and nothing else
changes: tokens, forks, prefix hits. test_scheduler_stateful tests random runs, and
test_kv_cache_groups models with two kinds of layers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.kv_cache_groups import KVGroups
from headrace_engine.core.request import Sequence
from headrace_engine.engine.engine import Engine
from headrace_engine.kv_cache.kv_cache_manager import KVCacheManager
from headrace_testing.checkpoints import Reference
from headrace_testing.engine import computed, make_config, make_request
from headrace_testing.engines import engine_config, greedy, make_runner, request, run
from headrace_testing.fake_runner import FakeRunner

ReferenceMaker = Callable[[str], Reference]
CheckpointMaker = Callable[[str], Path]


def test_blocks_before_the_window_are_free() -> None:
    cache = KVCacheManager(16, 4, groups=KVGroups.uniform(6))
    sequence = computed(cache, 23)
    # The position computed last, 22, sees those from 17 on: the fifth block and what follows.
    assert (len(sequence.block_table), sequence.released) == (6, 4)
    assert cache.pool.num_used == 2
    assert set(sequence.block_table[:4]) == {sequence.block_table[4]}
    cache.free(sequence)
    assert cache.pool.num_used == sequence.released == 0


def test_a_fork_can_compute_the_last_token_again() -> None:
    cache = KVCacheManager(16, 4, groups=KVGroups.uniform(6))
    parent, child = (
        computed(cache, 22),
        Sequence(make_request("r", range(1, 23)), 1, list(range(1, 23))),
    )
    cache.fork(parent, child, 22)
    assert child.num_computed_tokens == 21 and child.released == parent.released == 4
    for sequence in (parent, child):
        cache.free(sequence)
    assert cache.pool.num_used == 0


def test_released_blocks_are_still_found_by_others() -> None:
    cache = KVCacheManager(16, 4, groups=KVGroups.uniform(6))
    sequence = computed(cache, 20)
    other = Sequence(make_request("o", range(1, 18)), 0, list(range(1, 18)))
    assert len(cache.match_prefix(other)) == 4
    assert cache.match_prefix(other)[0] not in sequence.block_table


def test_a_long_output_needs_the_blocks_of_one_window() -> None:
    runner = FakeRunner(
        num_blocks=16, block_size=4, max_model_len=64, kv_groups=KVGroups.uniform(8)
    )
    engine = Engine(make_config(watermark=0.0), runner)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for name in ("a", "b", "c"):
        engine.add_request(make_request(name, (1, 2, 3), params=params))
    while engine.has_work:
        engine.step()
        assert engine.stats().blocks_used <= 3 * 4
    assert engine.stats().preemptions == 0


def test_tokens_equal_transformers_far_beyond_the_window(
    checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    folder, length = checkpoint("mistral"), 48
    paths = reference("mistral").clear_paths(2, length, lambda index: 20 + index)
    runner = make_runner(folder, num_blocks=20, attention_backend="reference")
    assert runner.kv_groups == KVGroups.uniform(12)
    engine = Engine(engine_config(folder, watermark=0.0, enable_prefix_caching=False), runner)
    found = run(
        engine,
        [request(str(index), path.prompt, greedy(length)) for index, path in enumerate(paths)],
    )
    assert [tuple(one.token_ids) for one in found.values()] == [path.output for path in paths]
    # Without release the two need 35 blocks.
    assert engine.stats().preemptions == 0


def test_released_blocks_are_computed_again_after_a_preemption(
    checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    folder, length = checkpoint("mistral"), 30
    paths = reference("mistral").clear_paths(8, length, lambda index: 3 + index)
    options: dict[str, Any] = {"attention_backend": "auto", "num_blocks": 18, "watermark": 0.0}
    engine = Engine(engine_config(folder, **options), make_runner(folder, **options))
    requests = [request(str(i), path.prompt, greedy(length)) for i, path in enumerate(paths)]
    found = run(engine, requests)
    for index, path in enumerate(paths):
        assert tuple(found[str(index), 0].token_ids) == path.output
    assert engine.stats().preemptions > 0


def test_the_transformers_implementation_reports_its_window(checkpoint: CheckpointMaker) -> None:
    runner = make_runner(checkpoint("mistral"), model_implementation="transformers")
    assert runner.kv_groups == KVGroups.uniform(12)
