"""Llama 4's layers whose positions see the keys of their own chunk alone: which blocks they keep,
and that tokens equal transformers' whatever the steps' sizes, prefix hits, forks and drafts.

test_models compares the other families in the same way, test_attention the backends' masks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_engine import attention
from headrace_engine.attention.flash import FlashBackend
from headrace_engine.core.attention_backend import AttendsInChunks
from headrace_engine.core.errors import ConfigError
from headrace_engine.core.kv_cache_groups import KVGroups, KVLayout
from headrace_engine.core.request import Sequence
from headrace_engine.core.speculative_config import SpeculativeConfig
from headrace_engine.engine.engine import Engine
from headrace_engine.kv_cache.kv_cache_manager import KVCacheManager
from headrace_engine.models.decoder.fused import FusedDecoder
from headrace_testing.checkpoints import GreedyPath, Reference, save_checkpoint
from headrace_testing.engine import computed, make_request
from headrace_testing.engines import cpu_backends, engine_config, greedy, make_runner, request, run

CheckpointMaker = Callable[[str], Path]
ReferenceMaker = Callable[[str], Reference]

LENGTH = 20
NGRAM = SpeculativeConfig(
    method="ngram", prompt_lookup_min=1, num_speculative_tokens=3, adaptive=False
)


@pytest.fixture(scope="module")
def paths(reference: ReferenceMaker) -> list[GreedyPath]:
    """Prompts that end before, at and behind borders of chunks of 12, and cross several."""
    return reference("llama4").clear_paths(8, LENGTH, lambda index: 3 + 6 * index)


def serve(folder: Path, paths: list[GreedyPath], **options: Any) -> Engine:
    engine = Engine(engine_config(folder, **options), make_runner(folder, **options))
    requests = [
        request(str(at), path.prompt, greedy(LENGTH, n=1 + at % 2)) for at, path in enumerate(paths)
    ]
    for (name, choice), output in run(engine, requests).items():
        assert tuple(output.token_ids) == paths[int(name)].output, f"prompt {name}, {choice}"
    assert engine.stats().blocks_used == 0
    return engine


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
@pytest.mark.parametrize("backend", cpu_backends())
def test_greedy_tokens_equal_transformers(
    chunk: int, backend: str, checkpoint: CheckpointMaker, paths: list[GreedyPath]
) -> None:
    # A few tokens at a time, three prompts cross as many borders as eight do.
    serve(
        checkpoint("llama4"),
        paths[:3] if chunk < 16 else paths,
        attention_backend=backend,
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, 8),
    )


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"speculative_config": NGRAM},
        {"swap_space": 0.001, "num_blocks": 24},
        {"disable_hybrid_kv_cache_manager": True},
        {"num_blocks": 48, "max_num_batched_tokens": 32, "watermark": 0.0},
    ],
)
def test_no_feature_of_the_engine_changes_a_token(
    options: dict[str, Any], checkpoint: CheckpointMaker, paths: list[GreedyPath]
) -> None:
    engine = serve(checkpoint("llama4"), paths, **options)
    if "watermark" in options:
        assert engine.stats().preemptions > 0


def test_prefix_hits_on_every_block_border_change_no_token(
    checkpoint: CheckpointMaker, reference: ReferenceMaker
) -> None:
    folder, prefix = checkpoint("llama4"), tuple(range(10, 43))
    runner = make_runner(folder)
    engine, size = Engine(engine_config(folder), runner), runner.block_size
    shared = [prefix[: blocks * size] for blocks in range(1, 9)]
    paths = reference("llama4").clear_paths(8, 8, lambda _: 6, lambda index: shared[index])
    for begin, path in zip(shared, paths, strict=True):
        run(engine, [request("first", (*begin, 5), greedy(1))])
        found = run(engine, [request("next", path.prompt, greedy(8))])["next", 0]
        assert tuple(found.token_ids) == path.output
        assert found.cached_tokens == len(begin)


def test_the_native_kernels_compute_whole_steps(checkpoint: CheckpointMaker) -> None:
    if "cpu" not in cpu_backends():
        pytest.skip("no native kernels")
    runner = make_runner(checkpoint("llama4"), attention_backend="cpu")
    assert isinstance(runner.model, FusedDecoder)


def test_layers_in_chunks_have_block_tables_of_their_own(checkpoint: CheckpointMaker) -> None:
    assert make_runner(checkpoint("llama4")).kv_groups == KVGroups(1, 1, 12, chunked=True)


def test_layers_in_chunks_alone_are_one_group() -> None:
    assert KVLayout.of((8, 8), chunked=True).groups == KVGroups(0, 1, 8, chunked=True)


def test_blocks_of_earlier_chunks_are_free() -> None:
    cache = KVCacheManager(32, 4, groups=KVGroups.uniform(8, chunked=True))
    # The position computed last, 15, is the last of its chunk, and sees those from 8 on.
    sequence = computed(cache, 16)
    assert (sequence.released, cache.pool.num_used) == (2, 2)
    cache.free(sequence)
    # Position 16 begins the next chunk.
    sequence = computed(cache, 17)
    assert (sequence.released, cache.pool.num_used) == (4, 1)
    assert set(sequence.block_table[:4]) == {sequence.block_table[4]}


def test_chunks_that_are_no_multiple_of_a_block_keep_the_block_that_they_share() -> None:
    cache = KVCacheManager(32, 4, groups=KVGroups.uniform(6, chunked=True))
    sequence = computed(cache, 13)
    assert (sequence.released, cache.pool.num_used) == (3, 1)
    cache.free(sequence)
    sequence = computed(cache, 8)
    assert (sequence.released, cache.pool.num_used) == (1, 1)


def test_a_prefix_needs_the_blocks_of_its_last_chunk_alone() -> None:
    cache = KVCacheManager(9, 4, prefix_caching=True, groups=KVGroups(1, 1, 8, chunked=True))
    first = computed(cache, 21)
    assert first.released == 4
    cache.free(first)
    longer = Sequence(make_request("l", range(1, 30)), 0, list(range(1, 30)))
    matched = cache.match_prefix(longer)
    assert len(matched) == 5 * 2, "the last chunk's only block is cached"
    cache.start(longer, matched)
    assert (longer.num_computed_tokens, longer.released) == (20, 4)


def test_a_fork_can_compute_the_last_token_of_a_chunk_again() -> None:
    cache = KVCacheManager(32, 4, groups=KVGroups.uniform(8, chunked=True))
    parent = computed(cache, 16)
    child = Sequence(make_request("r", range(1, 17)), 1, list(range(1, 17)))
    cache.fork(parent, child, 16)
    assert child.num_computed_tokens == 15 and child.released == 2
    for sequence in (parent, child):
        cache.free(sequence)
    assert cache.pool.num_used == 0


def test_backends_without_chunks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(FlashBackend.__new__(FlashBackend), AttendsInChunks)
    monkeypatch.setattr(attention, "_make", lambda *_: FlashBackend.__new__(FlashBackend))
    with pytest.raises(ConfigError, match="flash does not attend in chunks: use attention_backend"):
        attention.select("flash", torch.device("cuda"), torch.bfloat16, chunks=True)


def test_transformers_refuses_chunks_by_name(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama4")
    with pytest.raises(ConfigError, match="chunked"):
        make_runner(folder, model_implementation="transformers")
