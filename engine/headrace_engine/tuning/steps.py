"""Measures whole decode steps as they will be recorded: with kernels one after the other, or such
that each begins while the one before it ends; with norms of their own, or as parts of the products
around them. What is hidden so no kernel's own time shows.
"""

from collections.abc import Iterable
from functools import partial

import torch

from ..attention.base import AttentionMetadata, SkipsPadding
from ..attention.triton import TritonBackend
from ..config import EngineConfig
from ..model.base import ForwardBatch
from ..model.decoder import Decoder
from ..model.norm_fusion import NormFusingDecoder
from ..model.parallel_decoder import ParallelDecoder
from ..model.triton_ops import TritonOps
from ..placement import PlacedModel
from ..triton_kernels.dependent import DependentLaunch, StepLaunch
from ..triton_kernels.launch import ROW_BOUNDS
from .autotuner import Autotuner, Run

# Steps of up to so many sequences are recorded alike; larger ones keep one kernel after the other.
STEP_BOUNDS = (1, 16, 64, 256)
STEP_KEYS = 1024
# KV of all layers: more than caches hold of one.
STEP_POOL_BYTES = 2 << 30
MIB = 1 << 20
ONE_BY_ONE = "one by one"
CANDIDATES: dict[str, DependentLaunch | None] = {
    ONE_BY_ONE: None,
    "dependent": DependentLaunch(),
    "dependent, 4 MiB ahead": DependentLaunch(4 * MIB),
    "dependent, 8 MiB ahead": DependentLaunch(8 * MIB),
    "dependent, 16 MiB ahead": DependentLaunch(16 * MIB),
    "early": DependentLaunch(0, early=True),
    "early, 8 MiB ahead": DependentLaunch(8 * MIB, early=True),
    "dependent, 8 MiB ahead by lines": DependentLaunch(8 * MIB, lines=True),
    "early, 8 MiB ahead by lines": DependentLaunch(8 * MIB, early=True, lines=True),
}
# With fused norms, besides what is the fastest with norms of their own.
FUSED_CANDIDATES = (ONE_BY_ONE, "dependent", "dependent, 8 MiB ahead")
APART, FUSED = "apart", "fused"
# Between logits that were rounded at other places in all layers; see docs/decisions/0025.
ROUNDING = 6e-2


def can_depend(placed: PlacedModel) -> bool:
    """Whether its decode steps are recorded, in this process alone, with kernels of ours.

    Ranks would have to measure together, as each waits for the others' sums.
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
    """Of `bound` of STEP_BOUNDS sequences, where `can_depend` holds, over as much KV at most."""
    scene = StepScene(placed, config, min(bound, config.max_num_seqs), pool_bytes)
    if isinstance(placed.attention, TritonBackend):
        placed.attention.dependent = scene.ops.dependent
    overlap = _choose_overlap(tuner, scene, scene.name, CANDIDATES, fused=False)
    chosen = StepLaunch(CANDIDATES[overlap])
    if isinstance(placed.model, NormFusingDecoder) and bound <= ROW_BOUNDS[-1]:
        chosen = _choose_norms(tuner, scene, overlap)
    scene.ops.dependent.choose(bound, chosen)


def _choose_overlap(
    tuner: Autotuner, scene: "StepScene", name: str, overlaps: Iterable[str], fused: bool
) -> str:
    """Of steps that differ in nothing else, so that all must have the same bits."""
    runs: dict[str, Run] = {
        one: partial(scene.run, StepLaunch(CANDIDATES[one], fused)) for one in overlaps
    }
    return tuner.choose(name, runs, scene.read_bytes, tolerance=0.0)


def _choose_norms(tuner: Autotuner, scene: "StepScene", overlap: str) -> StepLaunch:
    """`overlap` is the best with norms of their own. Fused ones are rounded otherwise."""
    apart, overlaps = StepLaunch(CANDIDATES[overlap]), dict.fromkeys((*FUSED_CANDIDATES, overlap))
    name = f"{scene.name}, fused norms"
    best = _choose_overlap(tuner, scene, name, overlaps, fused=True)
    if best in tuner.choices[-1].refused:
        return apart
    ways = {APART: apart, FUSED: StepLaunch(CANDIDATES[best], fused_norms=True)}
    runs: dict[str, Run] = {one: partial(scene.run, way) for one, way in ways.items()}
    chosen = tuner.choose(f"{scene.name}, norms", runs, scene.read_bytes, tolerance=ROUNDING)
    return ways[chosen]


class StepScene:
    """A decode step of `rows` sequences over `caches` of its own. They share blocks where there is
    no room for all of them, but never the ones that they write to."""

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
    def name(self) -> str:
        layers = len(self._model.kv_shapes)
        read = f"{self.read_bytes / MIB:.1f} MiB read"
        return f"step, rows {self._rows}, keys {self._keys}, {layers} layers, {read}"

    @property
    def read_bytes(self) -> int:
        """Of products' weights, keys and values."""
        return self._kv_bytes + _weight_bytes(self.ops, self._rows)

    def run(self, step: StepLaunch) -> torch.Tensor:
        """Logits of a step whose kernels are launched so."""
        with self.ops.dependent.during(step):
            return self._model.forward(self._batch, self.caches)

    def _decode(self, full: int, device: torch.device) -> ForwardBatch:
        rows, whole = self._rows, torch.int32
        numbers = torch.arange(rows, device=device)
        read = rows + torch.arange(rows * full, device=device).view(rows, full) % self._shared
        metadata = AttentionMetadata(
            query_start=torch.arange(rows + 1, dtype=whole, device=device),
            seq_lens=torch.full((rows,), self._keys, dtype=whole, device=device),
            block_tables=torch.cat((read, numbers[:, None]), 1).to(whole),
            slots=numbers * self._size + (self._keys - 1) % self._size,
            num_decodes=rows,
            max_query_len=1,
            max_seq_len=self._keys,
        )
        positions = torch.full((rows,), self._keys - 1, device=device)
        return ForwardBatch(numbers % self._model.vocab_size, positions, numbers, metadata)


def _weight_bytes(ops: TritonOps, rows: int) -> int:
    """Of all products of such a step, and of the experts that somebody takes."""
    layers = [
        *(layer.weight_bytes for one in ops.products.shapes.values() for layer in one.layers),
        *(layer.weight_bytes for one in ops.levels.shapes.values() for layer in one.layers),
        *(layer.weight_bytes for one in ops.float8.shapes.values() for layer in one.layers),
    ]
    mixtures = ops.mixtures.shapes.items()
    return sum(layers) + sum(len(one.layers) * of.read_bytes(rows) for of, one in mixtures)
