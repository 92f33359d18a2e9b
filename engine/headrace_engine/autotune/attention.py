"""Measures how the keys of decodes are split, where their parts are merged, and the tiles of both
attention kernels. Uses one layer's KV of random numbers, whose blocks lie in random order."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..attention.triton import TritonBackend
from ..core.attention_backend import AttentionMetadata, KVSpec, LayerCache, LayerParams
from ..kernels.triton.launch import (
    DECODE_BOUNDS,
    AttentionLaunches,
    DecodeLaunch,
    Launch,
    merge_candidates,
    part_candidates,
    prefill_candidates,
    tile_candidates,
)
from .autotuner import Autotuner, Run
from .layers import dtype_name

# Bytes of the layer's KV, more than caches hold, and the number of batches that read it in turn.
POOL_BYTES = 1 << 30
MOST_ROTATIONS = 32
# The average number of keys of a sequence; lengths go from half of it to one and a half times it.
DECODE_CONTEXT = 1024
PREFILL_TOKENS = 4096
# What is chosen one after the other, and the candidates after the best launch so far.
DECODE_CHOICES: Mapping[str, Callable[[DecodeLaunch], list[DecodeLaunch]]] = {
    "parts": part_candidates,
    "merging": merge_candidates,
    "tile": tile_candidates,
}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A layer's attention, and the largest numbers of sequences, keys and prompt tokens to measure.

    `pool_bytes` is the size of the KV that measurements read.
    """

    num_heads: int
    spec: KVSpec
    params: LayerParams
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    pool_bytes: int = POOL_BYTES

    @property
    def name(self) -> str:
        dtypes = map(dtype_name, (self.spec.dtype, self.spec.stored))
        heads = f"heads {self.num_heads}/{self.spec.num_kv_heads} of {self.spec.head_dim}"
        return f"{heads}, {', KV '.join(dtypes)}"


def tune_attention(tuner: Autotuner, backend: TritonBackend, shape: AttentionShape) -> None:
    benchmark = _AttentionBenchmark(backend, shape)
    launches = AttentionLaunches(decodes=benchmark.decodes(tuner))
    backend.use(replace(launches, prefill=benchmark.prefill(tuner)))


class _AttentionBenchmark:
    def __init__(self, backend: TritonBackend, shape: AttentionShape) -> None:
        self._backend, self._shape, self._spec = backend, shape, shape.spec
        self._blocks = max(2, shape.pool_bytes // backend.block_bytes(shape.spec))
        self._cache = _filled(backend.allocate(self._blocks, shape.spec))
        self._params = replace(shape.params, sliding_window=None, chunk=None)

    @property
    def _token_bytes(self) -> int:
        return self._backend.block_bytes(self._spec) // self._spec.block_size

    def decodes(self, tuner: Autotuner) -> tuple[tuple[int, DecodeLaunch], ...]:
        bounds = [
            bound
            for below, bound in zip((0, *DECODE_BOUNDS), DECODE_BOUNDS, strict=False)
            if below < self._shape.max_num_seqs
        ]
        return tuple((bound, self._decode(tuner, bound)) for bound in bounds)

    def _decode(self, tuner: Autotuner, sequences: int) -> DecodeLaunch:
        longest = min(2 * DECODE_CONTEXT, self._shape.max_model_len)
        lengths = [
            longest * (sequences + 2 * one + 1) // (4 * sequences) for one in range(sequences)
        ]
        batches = self._batches(lengths, longest)
        table = self._backend.decode_launch(
            self._spec.dtype.itemsize, self._spec.head_dim, sequences
        )
        what = f"decode, sequences {sequences}, {self._shape.name}"
        best = table
        for choice, candidates in DECODE_CHOICES.items():
            best = self._best_decode(tuner, f"{what}, {choice}", candidates(best), batches)
        return best

    def _best_decode(
        self,
        tuner: Autotuner,
        what: str,
        launches: list[DecodeLaunch],
        batches: list[AttentionMetadata],
    ) -> DecodeLaunch:
        query, most = self._query(batches[0]), len(batches[0].seq_lens)
        named = {_decode_name(launch): launch for launch in launches}
        runs: dict[str, Run] = {
            name: partial(self._run, AttentionLaunches(decodes=((most, launch),)), query, batches)
            for name, launch in named.items()
        }
        keys = sum(int(one.seq_lens.sum()) for one in batches)
        return named[tuner.choose(what, runs, keys * self._token_bytes)]

    def prefill(self, tuner: Autotuner) -> Launch:
        shape = self._shape
        tokens = min(PREFILL_TOKENS, shape.max_model_len, shape.max_num_batched_tokens)
        table = self._backend.prefill_launch(self._spec.dtype.itemsize, self._spec.head_dim)
        batches = [self._metadata([tokens], tokens, tokens, self._random_blocks())]
        query = self._query(batches[0])
        named = {_tile_name(launch): launch for launch in prefill_candidates(table)}
        runs: dict[str, Run] = {
            name: partial(self._run, AttentionLaunches(prefill=launch), query, batches)
            for name, launch in named.items()
        }
        return named[tuner.choose(f"prefill, {shape.name}", runs)]

    def _query(self, batch: AttentionMetadata) -> torch.Tensor:
        shape = (len(batch.slots), self._shape.num_heads, self._spec.head_dim)
        return torch.randn(shape, device=self._spec.device).to(self._spec.dtype)

    def _run(
        self, launches: AttentionLaunches, query: torch.Tensor, batches: list[AttentionMetadata]
    ) -> torch.Tensor:
        self._backend.use(launches)
        params, cache = self._params, self._cache
        return [self._backend.attend(query, cache, one, params) for one in batches][0]

    def _batches(self, lengths: list[int], longest: int) -> list[AttentionMetadata]:
        """Batches of decodes that read the whole pool in turn."""
        order = self._random_blocks()
        used = sum(self._num_blocks(length) for length in lengths)
        count = min(MOST_ROTATIONS, max(1, self._blocks // used))
        return [
            self._metadata(_shuffled(lengths), 1, longest, order.roll(-batch * used))
            for batch in range(count)
        ]

    def _random_blocks(self) -> torch.Tensor:
        """All blocks of the pool, in random order."""
        return torch.randperm(self._blocks).to(torch.int32)

    def _num_blocks(self, keys: int) -> int:
        return -(-keys // self._spec.block_size)

    def _metadata(
        self, lengths: list[int], tokens: int, longest: int, order: torch.Tensor
    ) -> AttentionMetadata:
        """Metadata of sequences of `lengths` keys, at most `longest`, with `tokens` new tokens
        each. They get the blocks of `order`, which they share only if the pool has too few: a cache
        would serve what two sequences read."""
        device, whole, sequences = self._spec.device, torch.int32, len(lengths)
        tables = torch.zeros(sequences, self._num_blocks(longest), dtype=whole)
        taken = 0
        for row, count in zip(tables, map(self._num_blocks, lengths), strict=True):
            row[:count] = order[torch.arange(taken, taken + count) % len(order)]
            taken += count
        return AttentionMetadata(
            query_start=torch.arange(sequences + 1, dtype=whole, device=device) * tokens,
            seq_lens=torch.tensor(lengths, dtype=whole, device=device),
            block_tables=tables.to(device),
            slots=torch.zeros(sequences * tokens, dtype=torch.int64, device=device),
            num_decodes=sequences if tokens == 1 else 0,
            max_query_len=tokens,
            max_seq_len=longest,
        )


def _shuffled(lengths: list[int]) -> list[int]:
    return [lengths[place] for place in torch.randperm(len(lengths))]


def _filled(cache: LayerCache) -> LayerCache:
    """Fills a cache with copies of one random block: reads still go to different memory."""
    for part in cache:
        block = torch.randn(part.shape[1:], device=part.device).to(part.dtype)
        part.copy_(block.expand_as(part))
    return cache


def _tile_name(launch: Launch) -> str:
    return f"{launch.rows}x{launch.keys}, warps {launch.warps}, stages {launch.stages}"


def _decode_name(launch: DecodeLaunch) -> str:
    merge = "within" if launch.merges else "apart"
    return f"{_tile_name(launch.tile)}, part {launch.part}, merge {merge}"
