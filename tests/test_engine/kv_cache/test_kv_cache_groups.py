"""If some layers keep all positions and others a window, each group of layers has its own blocks
from one pool. test_scheduler_stateful tests random runs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine import attention
from headrace_engine.core.kv_cache_groups import KVGroups, KVLayout
from headrace_engine.core.request import Sequence
from headrace_engine.cuda_graphs.cuda_graphs import CaptureSizes, GraphedModel
from headrace_engine.cuda_graphs.static_batch import StaticBatch
from headrace_engine.engine.engine import Engine
from headrace_engine.kv_cache.kv_cache_manager import KVCacheManager
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_testing.checkpoints import GreedyPath, Reference
from headrace_testing.engine import computed, make_request
from headrace_testing.engines import Output, engine_config, greedy, make_runner, request, run
from headrace_testing.rank_threads import RankThread
from headrace_testing.recorded_steps import PaddedReference, Replays

ReferenceMaker = Callable[[str], Reference]
CheckpointMaker = Callable[[str], Path]

LENGTH = 20
PROMPT = tuple(range(10, 40))
# The groups of models; in MiMo-V2 layers with a window have twice as many KV heads.
GROUPS = {"gemma3": KVGroups(1, 2, 10), "mimo-v2": KVGroups(1, 1, 10)}


def windows(layers: int, every: int, window: int = 512) -> list[int | None]:
    """Every `every`-th layer sees all keys."""
    return [None if (layer + 1) % every == 0 else window for layer in range(layers)]


@pytest.mark.parametrize(
    ("layers", "every", "full", "sliding", "places"),
    [
        (26, 6, 1, 6, 4),  # Gemma-3 1B: two of 28 slots stay empty
        (62, 6, 1, 6, 10),  # 27B
        (26, 2, 1, 1, 13),  # Gemma-2
        (36, 2, 1, 1, 18),  # gpt-oss
        (11, 2, 1, 1, 6),  # five layers that see all, six with a window: one slot stays empty
        (5, 6, 0, 1, 5),
        (5, 1, 1, 0, 5),
        (40, 40, 1, 0, 40),  # 40 block tables would cost more than they save
    ],
)
def test_layers_are_put_into_groups_of_one_size(
    layers: int, every: int, full: int, sliding: int, places: int
) -> None:
    layout = KVLayout.of(windows(layers, every))
    assert (layout.groups.full, layout.groups.sliding) == (full, sliding)
    assert len(layout.layer_of_each_place) == places
    assert len(set(zip(layout.layers, layout.places, strict=True))) == layers
    if layout.groups.count > 1:
        kinds = [group < full for group in layout.layers]
        assert kinds == [window is None for window in windows(layers, every)]
        assert KVLayout.of(windows(layers, every), hybrid=False).groups == KVGroups()


def test_layers_with_fewer_heads_use_a_part_of_a_block() -> None:
    layout = KVLayout.of([None, 8, 8, None, 8, 8])
    assert layout.groups == KVGroups(1, 2, 8)
    found = layout.with_sizes([64, 128, 128, 64, 128, 128])
    assert found is not None and found.parts == (2, 1, 1)
    assert layout.with_sizes([48, 128, 128, 48, 128, 128]) is None
    assert layout.with_sizes([64, 128, 128, 128, 128, 128]) is None


@given(
    st.builds(KVGroups, st.integers(1, 3), st.integers(1, 6), st.integers(1, 40)),
    st.integers(1, 400),
    st.sampled_from([1, 4, 16]),
)
def test_the_capacity_is_the_longest_sequence_that_fits(
    groups: KVGroups, num_blocks: int, size: int
) -> None:
    longest = groups.capacity(num_blocks, size)
    assert groups.blocks(longest, size) <= num_blocks < groups.blocks(longest + 1, size)


def test_a_prefix_is_found_where_each_group_has_what_it_keeps() -> None:
    cache = KVCacheManager(14, 4, groups=KVGroups(1, 2, 6))
    first = computed(cache, 25)
    assert (len(first.block_table), first.released, cache.pool.num_used) == (21, 4, 7 + 2 * 3)
    # One of the blocks that left the windows is still in the cache.
    cache.free(first)
    longer = Sequence(make_request("l", range(1, 30)), 0, list(range(1, 30)))
    matched = cache.match_prefix(longer)
    assert len(matched) == 6 * 3, "the blocks that the next position sees are enough"
    assert cache.blocks_to_start(longer, matched) == 8 + 2 * 3
    cache.start(longer, matched)
    assert (longer.num_computed_tokens, longer.released) == (24, 4)
    assert cache.pool.num_used == 6 + 2 * 2
    cache.free(longer)
    shorter = Sequence(make_request("s", range(1, 19)), 0, list(range(1, 19)))
    assert cache.match_prefix(shorter) == [], "what a window saw there is gone"


def test_sequences_that_fork_after_the_prompt_match_the_prompt_only() -> None:
    cache = KVCacheManager(64, 4, groups=KVGroups(1, 1, 4))
    computed(cache, 40)
    params = greedy(40, n=2)
    resumed = Sequence(make_request("r", range(1, 11), params=params), 0, list(range(1, 41)))
    assert len(cache.match_prefix(resumed)) == 2 * 2
    alone = Sequence(make_request("a", range(1, 11)), 0, list(range(1, 41)))
    assert len(cache.match_prefix(alone)) == 2 * 9


def check(output: Output, path: GreedyPath, reference: Reference) -> None:
    """Compares unlikely tokens, too: in such a small model the likely ones hardly depend on the
    context."""
    assert tuple(output.token_ids) == path.output
    logits = reference.logits((*path.prompt, *path.output))[len(path.prompt) - 1 : -1]
    exact = logits.log_softmax(-1)
    for row, entry in enumerate(output.logprobs):
        assert max(abs(value - float(exact[row, token])) for token, value in entry.top) < 1e-3


def serve(runner: ModelRunner, folder: Path, reference: Reference, **options: Any) -> Engine:
    """Runs one prompt to fill the prefix cache, then more that begin alike, with forks."""
    paths = reference.clear_paths(4, LENGTH, lambda index: 1 + index, lambda _: PROMPT)
    options = {"max_num_batched_tokens": 24, "watermark": 0.0, "max_num_seqs": 8, **options}
    engine = Engine(engine_config(folder, **options), runner)
    params = greedy(LENGTH, n=2, logprobs=5)
    for some in (paths[:1], paths):
        work = [request(str(index), path.prompt, params) for index, path in enumerate(some)]
        for (name, _), output in run(engine, work).items():
            check(output, paths[int(name)], reference)
    whole_blocks = 28 // runner.block_size * runner.block_size
    assert engine.stats().prefix_hit_tokens >= 4 * whole_blocks and engine.stats().preemptions > 0
    return engine


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma3", {"attention_backend": "auto"}),
        ("gemma3", {"attention_backend": "auto", "async_scheduling": True}),
        ("gemma3", {"attention_backend": "reference", "model_implementation": "transformers"}),
        ("mimo-v2", {"attention_backend": "reference"}),
        ("mimo-v2", {"attention_backend": "auto", "async_scheduling": True}),
        ("mimo-v2", {"attention_backend": "auto", "block_size": 16, "num_blocks": 24}),
    ],
)
def test_tokens_equal_transformers_while_windows_give_blocks_back(
    name: str, options: dict[str, Any], checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    folder = checkpoint(name)
    runner = make_runner(folder, **{"num_blocks": 64, **options})
    assert runner.kv_groups == GROUPS[name]
    serve(runner, folder, reference(name), **options)


@pytest.mark.parametrize("name", GROUPS)
def test_ranks_have_the_groups_too(
    name: str, checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    folder = checkpoint(name)
    config = engine_config(folder, num_blocks=64, tensor_parallel_size=2, threads=1)
    runner = ModelRunner(config, launch=RankThread)
    assert runner.peers is not None and runner.kv_groups == GROUPS[name]
    serve(runner, folder, reference(name))
    runner.peers.close()


@pytest.mark.parametrize("name", GROUPS)
def test_recorded_steps_read_each_groups_block_table(
    name: str, checkpoint: CheckpointMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "select", lambda *_: PaddedReference())
    folder = checkpoint(name)
    runner = make_runner(folder, max_num_seqs=8)
    config = engine_config(folder, max_num_seqs=8, enable_prefix_caching=False)
    work = [request(str(n), range(3, 9 + n), greedy(20 + 2 * n, logprobs=5)) for n in range(3)]
    expected = run(Engine(config, runner), work)
    replays, layout = Replays(), runner._placed.layout
    batch = StaticBatch(4, runner.max_model_len // 4, runner.device, layout=layout)
    assert batch.num_bytes > layout.groups.count * batch.view(4, 8).metadata.block_tables.nbytes
    with torch.inference_mode():
        sizes = CaptureSizes((4,), (runner.max_model_len,))
        runner.model = GraphedModel(runner.model, runner._caches, sizes, batch, replays)
    found = run(Engine(config, runner), work)
    assert found.keys() == expected.keys()
    for key, output in found.items():
        assert output.token_ids == expected[key].token_ids
        for own, other in zip(output.logprobs, expected[key].logprobs, strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert len(replays.used) > 20


@pytest.mark.parametrize(
    "options", [{"swap_space": 0.001}, {"disable_hybrid_kv_cache_manager": True}]
)
def test_one_group_is_used_if_requested_or_if_blocks_are_swapped(
    options: dict[str, Any], checkpoint: CheckpointMaker
) -> None:
    assert make_runner(checkpoint("gemma3"), num_blocks=32, **options).kv_groups == KVGroups()
