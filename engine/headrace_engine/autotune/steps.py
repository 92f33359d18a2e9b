"""Chooses, by measuring whole decode steps, whether kernels overlap or run one after the other, and
whether norms are separate kernels or fused into the products around them.

The steps are measured as CUDA graphs. The time of a single kernel does not show how much
overlapping saves.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch

from ..attention.triton import TritonBackend
from ..core.attention_backend import AttentionMetadata, SkipsPadding
from ..core.config import EngineConfig
from ..kernels.triton.dependent_launch import PLAIN_STEP, DependentLaunch, StepLaunch
from ..kernels.triton.launch import ROW_BOUNDS
from ..models.base import ForwardBatch
from ..models.decoder.decoder import Decoder
from ..models.decoder.norm_fusion import NormFusingDecoder
from ..models.decoder.parallel_decoder import ParallelDecoder
from ..models.placed_model import PlacedModel
from ..operators.triton import TritonOps
from .autotuner import STEP_GAIN, Autotuner, Run

# Steps of up to this many sequences use the measured choice; larger ones run kernels one after the
# other.
STEP_BOUNDS = (1, 16, 64, 256)
STEP_KEYS = 1024
# KV bytes of all layers; one layer's part is larger than the L2 cache.
STEP_POOL_BYTES = 2 << 30
MIB = 1 << 20
ONE_BY_ONE = "one by one"
CANDIDATES: dict[str, DependentLaunch | None] = {
    ONE_BY_ONE: None,
    "dependent": DependentLaunch(),
    "dependent, 8 MiB ahead": DependentLaunch(8 * MIB),
    "early": DependentLaunch(0, early=True),
    "early, 8 MiB ahead": DependentLaunch(8 * MIB, early=True),
    "dependent, 8 MiB ahead by lines": DependentLaunch(8 * MIB, lines=True),
    "early, 8 MiB ahead by lines": DependentLaunch(8 * MIB, early=True, lines=True),
}
# The overlaps that are measured with other kernels too, besides the fastest one without.
FEWER_CANDIDATES = (ONE_BY_ONE, "dependent", "early, 8 MiB ahead")
OWN_PRODUCTS, FUSED_NORMS = StepLaunch(own_products=True), StepLaunch(fused_norms=True)
# The names of these steps, and of those without what distinguishes them.
NAMES = {
    OWN_PRODUCTS: ("own products", "fastest products"),
    FUSED_NORMS: ("fused norms", "separate norms"),
}
# Allowed error of logits if each layer rounds other intermediate results; see docs/decisions/0025.
ROUNDING = 6e-2


def can_tune_steps(placed: PlacedModel) -> bool:
    """Whether decode steps are recorded, with our kernels, in this process alone.

    Ranks would have to measure together, because each waits for the others' sums.
    """
    model = placed.model
    return (
        isinstance(placed.ops, TritonOps)
        and isinstance(placed.attention, SkipsPadding)
        and isinstance(model, Decoder)
        and not isinstance(model, ParallelDecoder)
        and model.can_be_recorded
    )


def tune_steps(
    tuner: Autotuner, placed: PlacedModel, config: EngineConfig, bound: int, pool_bytes: int
) -> None:
    """Tunes steps of `bound` sequences, one of STEP_BOUNDS, with at most `pool_bytes` of KV; only
    if `can_tune_steps`."""
    benchmark = StepBenchmark(placed, config, min(bound, config.max_num_seqs), pool_bytes)
    if isinstance(placed.attention, TritonBackend):
        placed.attention.dependent_launches = benchmark.ops.dependent_launches
    overlap = _choose_overlap(tuner, benchmark, benchmark.name, CANDIDATES, PLAIN_STEP)
    chosen = StepLaunch(CANDIDATES[overlap])
    if bound <= ROW_BOUNDS[-1]:
        if benchmark.has_own_products:
            chosen = _choose_other(tuner, benchmark, chosen, overlap, OWN_PRODUCTS)
        if isinstance(placed.model, NormFusingDecoder):
            chosen = _choose_other(tuner, benchmark, chosen, overlap, FUSED_NORMS)
    benchmark.ops.dependent_launches.choose(bound, chosen)


def _choose_overlap(
    tuner: Autotuner,
    benchmark: "StepBenchmark",
    name: str,
    overlaps: Iterable[str],
    step: StepLaunch,
) -> str:
    """Chooses the overlap for `step`. Steps that differ only in overlap must have the same bits."""
    runs: dict[str, Run] = {
        one: partial(benchmark.run, replace(step, overlap=CANDIDATES[one])) for one in overlaps
    }
    return tuner.choose(name, runs, benchmark.read_bytes, tolerance=0.0, gain=STEP_GAIN)


def _choose_other(
    tuner: Autotuner,
    benchmark: "StepBenchmark",
    before: StepLaunch,
    overlap: str,
    other: StepLaunch,
) -> StepLaunch:
    """Chooses between `before` and `other` with its own best overlap; `overlap` is the best one of
    plain steps. They round differently."""
    what, without = NAMES[other]
    overlaps = dict.fromkeys((*FEWER_CANDIDATES, overlap))
    best = _choose_overlap(tuner, benchmark, f"{benchmark.name}, {what}", overlaps, other)
    if best in tuner.choices[-1].refused:
        return before
    ways = {without: before, what: replace(other, overlap=CANDIDATES[best])}
    runs: dict[str, Run] = {one: partial(benchmark.run, way) for one, way in ways.items()}
    chosen = tuner.choose(
        f"{benchmark.name}, {without} or {what}", runs, benchmark.read_bytes,
        tolerance=ROUNDING, gain=STEP_GAIN,
    )  # fmt: skip
    return ways[chosen]


class StepBenchmark:
    """A decode step of `rows` sequences over its own `caches`. If memory is short, sequences share
    blocks, but never those they write to."""

    def __init__(
        self, placed: PlacedModel, config: EngineConfig, rows: int, pool_bytes: int
    ) -> None:
        assert isinstance(placed.ops, TritonOps)
        self.ops, self._model, self._size = placed.ops, placed.model, config.block_size
        self._rows, self._keys = rows, min(STEP_KEYS, placed.max_model_len)
        block_bytes = placed.block_bytes(self._size)
        self._kv_bytes = rows * self._keys * block_bytes // self._size
        full = -(-self._keys // self._size) - 1
        self._shared = max(1, min(pool_bytes // block_bytes - rows, rows * full))
        self.caches = placed.allocate(rows + self._shared, self._size)
        self._batch = self._decode(full, placed.device)

    @property
    def has_own_products(self) -> bool:
        """Whether another kernel than this project's was chosen for some product of few rows."""
        place = bisect_left(ROW_BOUNDS, self._rows)
        return any(one.own[place] is not None for one in self.ops.products.shapes.values())

    @property
    def name(self) -> str:
        layers = len(self._model.kv_shapes)
        read = f"{self.read_bytes / MIB:.1f} MiB read"
        return f"step, rows {self._rows}, keys {self._keys}, {layers} layers, {read}"

    @property
    def read_bytes(self) -> int:
        """Bytes of the products' weights, keys and values."""
        return self._kv_bytes + _weight_bytes(self.ops, self._rows)

    def run(self, step: StepLaunch) -> torch.Tensor:
        """Computes the logits of a step, with its kernels launched as `step` says."""
        with self.ops.dependent_launches.during(step):
            return self._model.forward(self._batch, self.caches)

    def _decode(self, full: int, device: torch.device) -> ForwardBatch:
        rows, int32 = self._rows, torch.int32
        numbers = torch.arange(rows, device=device)
        read = rows + torch.arange(rows * full, device=device).view(rows, full) % self._shared
        metadata = AttentionMetadata(
            query_start=torch.arange(rows + 1, dtype=int32, device=device),
            seq_lens=torch.full((rows,), self._keys, dtype=int32, device=device),
            block_tables=torch.cat((read, numbers[:, None]), 1).to(int32),
            slots=numbers * self._size + (self._keys - 1) % self._size,
            num_decodes=rows,
            max_query_len=1,
            max_seq_len=self._keys,
        )
        positions = torch.full((rows,), self._keys - 1, device=device)
        return ForwardBatch(numbers % self._model.vocab_size, positions, numbers, metadata)


def _weight_bytes(ops: TritonOps, rows: int) -> int:
    """Bytes of the weights that a step of `rows` rows multiplies, counting only chosen experts."""
    layers = [
        *(layer.weight_bytes for one in ops.products.shapes.values() for layer in one.layers),
        *(layer.weight_bytes for one in ops.packed.shapes.values() for layer in one.layers),
        *(layer.weight_bytes for one in ops.float8.shapes.values() for layer in one.layers),
    ]
    mixtures = ops.mixtures.shapes.items()
    return sum(layers) + sum(len(one.layers) * of.read_bytes(rows) for of, one in mixtures)
