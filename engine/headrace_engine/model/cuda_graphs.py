"""Decode steps as CUDA graphs: a step's kernels are recorded once and launched by one call.

A graph has the addresses and grids that it was recorded with. So there is one for each size of a
ladder of batches and each bound of a few on contexts, and a step is copied into the buffers of the
smallest that takes it; where adapters are served there are two of each, with them and without. What
is no pure decode goes the model's own way.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch

from ..attention.base import AttentionBackend, LayerCache, SkipsPadding
from ..config import EngineConfig
from ..kv_groups import ONE_GROUP, KVLayout
from ..lora.batch import StaticLoRA
from ..triton_kernels.dependent import DependentLaunches
from .base import CausalModel, ForwardBatch, KVShape, SharedModel
from .decoder import Decoder
from .static_batch import StaticBatch

logger = logging.getLogger(__name__)

# Beyond these every LARGE_STEP-th size is recorded: padding costs little there.
SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LARGE_STEP = 128
# Bounds on contexts: the grids of attention are as large as the bound is.
CONTEXTS = (1024, 2048, 4096)

Run = Callable[[], torch.Tensor]
# Bytes of device memory that nobody has.
Free = Callable[[], int]


class Capture(Protocol):
    def __call__(self, run: Run) -> Run:
        """Records what `run` launches; each call does it again, into the same output."""


class CudaCapture:
    """All recordings share one pool of memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        run()  # compiles kernels and grows scratch memory, which must not be recorded
        torch.cuda.synchronize()
        make_graph: Any = torch.cuda.CUDAGraph
        graph = make_graph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


class MeteredCapture:
    """Another capture that notes what memory is `left` behind each recording."""

    def __init__(self, capture: Capture, free: Free) -> None:
        self._capture, self._free = capture, free
        self.left: list[int] = []

    def __call__(self, run: Run) -> Run:
        if not self.left:
            run()  # what stays without graphs, too, is not theirs
            self.left.append(self._free())
        made = self._capture(run)
        self.left.append(self._free())
        return made

    def extrapolated(self, recordings: int) -> int:
        """Bytes that so many take: the first makes the pool that all share, and each further one
        takes as much as the dearest of those that were made."""
        first, *further = [max(0, before - after) for before, after in pairwise(self.left)]
        return first + (recordings - 1) * max(further, default=0)


@dataclass(frozen=True, slots=True)
class Ladder:
    """The sizes of batches and the longest contexts for which there are graphs, both upwards."""

    sizes: tuple[int, ...]
    contexts: tuple[int, ...]

    @classmethod
    def up_to(cls, max_num_seqs: int, max_model_len: int) -> "Ladder":
        sizes = [size for size in SMALL_SIZES if size < max_num_seqs]
        sizes += range(SMALL_SIZES[-1] + LARGE_STEP, max_num_seqs, LARGE_STEP)
        contexts = [length for length in CONTEXTS if length < max_model_len]
        return cls((*sizes, max_num_seqs), (*contexts, max_model_len))

    def top(self) -> "Ladder":
        """The two largest sizes with the longest context."""
        return Ladder(self.sizes[-2:], self.contexts[-1:])

    def size(self, count: int) -> int | None:
        """The smallest size for `count` sequences; None: there is none."""
        return _at_least(self.sizes, count)

    def context(self, length: int) -> int | None:
        return _at_least(self.contexts, length)


def _at_least(steps: tuple[int, ...], wanted: int) -> int | None:
    place = bisect_left(steps, wanted)
    return steps[place] if place < len(steps) else None


class GraphedModel:
    """A model whose pure decodes over `caches` are replayed. The logits of a step are overwritten
    by the next one. Makes all recordings when it is made: largest first, as they share memory.
    """

    def __init__(
        self,
        model: CausalModel,
        caches: Rows[LayerCache],
        ladder: Ladder,
        batch: StaticBatch,
        capture: Capture,
    ) -> None:
        self._model, self._caches = model, caches
        self._ladder, self._batch = ladder, batch
        self._dependent = _dependent(model)
        self._logits: torch.Tensor | None = None
        self._graphs = {
            (size, context, adapted): capture(self._step(size, context, adapted))
            for size in reversed(ladder.sizes)
            for context in reversed(ladder.contexts)
            for adapted in batch.kinds
        }

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        return self._model.kv_shapes

    def forward(self, batch: ForwardBatch, caches: Rows[LayerCache]) -> torch.Tensor:
        size = self._ladder.size(len(batch.input_ids))
        context = self._ladder.context(batch.metadata.max_seq_len)
        if size is None or context is None or not self._replays(batch, caches):
            return self._model.forward(batch, caches)
        self._batch.fill(batch, size)
        return self._graphs[size, context, batch.lora is not None]()[: len(batch.input_ids)]

    def _replays(self, batch: ForwardBatch, caches: Rows[LayerCache]) -> bool:
        """Whether it is one token a sequence, each of which is asked for."""
        count, metadata = len(batch.input_ids), batch.metadata
        return (
            metadata.num_decodes == len(metadata.seq_lens) == count
            and len(batch.logits_rows) == count
            and self._batch.takes(batch)
            and caches is self._caches
        )

    def _step(self, size: int, context: int, adapted: bool) -> Run:
        view = self._batch.view(size, context, adapted)
        how = self._dependent.chosen(size)

        def run() -> torch.Tensor:
            with self._dependent.during(how):
                return self._keep(self._model.forward(view, self._caches))

        return run

    def _keep(self, logits: torch.Tensor) -> torch.Tensor:
        """In one place for all recordings, whose pool could not use theirs again."""
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        return self._logits[: len(logits)].copy_(logits)


def _dependent(model: CausalModel) -> DependentLaunches:
    """How the model's kernels are launched."""
    own = model.dependent if isinstance(model, Decoder) else None
    return own or DependentLaunches()


@dataclass(frozen=True, slots=True)
class Decodes:
    """A model's pure decodes over `caches`, up to contexts of `max_model_len`; with `lora` those
    with adapters, too."""

    model: CausalModel
    attention: AttentionBackend
    caches: Rows[LayerCache]
    config: EngineConfig
    max_model_len: int
    lora: StaticLoRA | None = None
    layout: KVLayout = ONE_GROUP

    @property
    def device(self) -> torch.device:
        return self.caches[0][0].device

    @property
    def ladder(self) -> Ladder:
        return Ladder.up_to(self.config.max_num_seqs, self.max_model_len)

    def static_batch(self) -> StaticBatch:
        blocks = -(-self.max_model_len // self.config.block_size)
        return StaticBatch(self.config.max_num_seqs, blocks, self.device, self.lora, self.layout)

    def record(self, ladder: Ladder, batch: StaticBatch, capture: Capture) -> GraphedModel:
        with torch.inference_mode():
            return GraphedModel(self.model, self.caches, ladder, batch, capture)

    def refusal(self) -> str | None:
        """Why they cannot be recorded."""
        if self.config.enforce_eager:
            return "enforce_eager is set"
        if self.device.type != "cuda":
            return "there is no CUDA device"
        if not isinstance(self.attention, SkipsPadding):
            return f"attention backend {self.attention.name} cannot be recorded"
        if not isinstance(self.model, Decoder) or not self.model.can_be_recorded:
            return "the model waits for the device within a step"
        return None


def with_graphs(decodes: Decodes) -> CausalModel:
    """The model with its decodes recorded; the model itself where they are not, and a log why."""
    model = decodes.model
    if isinstance(model, SharedModel):
        return model.recorded(
            lambda own: with_graphs(replace(decodes, model=own)), decodes.max_model_len
        )
    reason = decodes.refusal()
    if reason is not None:
        if decodes.device.type == "cuda":
            logger.info("no CUDA graphs", extra={"reason": reason})
        return model
    ladder = decodes.ladder
    graphed = decodes.record(ladder, decodes.static_batch(), CudaCapture())
    adapted = decodes.lora is not None
    logger.info(
        "CUDA graphs recorded",
        extra={"sizes": ladder.sizes, "contexts": ladder.contexts, "lora": adapted},
    )
    return graphed


def graph_bytes(decodes: Decodes) -> int:
    """What `with_graphs` will take of this process's device, by recording its two largest steps,
    which are given up again. The caches may be of any size: nothing is read or written in them.

    0 where nothing is recorded. Processes that share a model do this together.
    """
    model, device = decodes.model, decodes.device
    if isinstance(model, SharedModel):
        return model.measured(
            lambda own: graph_bytes(replace(decodes, model=own)), decodes.max_model_len
        )
    if decodes.refusal() is not None:
        return 0
    metered = MeteredCapture(CudaCapture(), lambda: free_bytes(device))
    ladder, batch = decodes.ladder, decodes.static_batch()
    decodes.record(ladder.top(), batch, metered)
    steps = len(ladder.sizes) * len(ladder.contexts) * len(batch.kinds)
    return batch.num_bytes + metered.extrapolated(steps)


def free_bytes(device: torch.device) -> int:
    """Of a CUDA device."""
    return int(torch.cuda.mem_get_info(device)[0])
