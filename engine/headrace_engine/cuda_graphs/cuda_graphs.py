"""Decode steps as CUDA graphs: a step's kernels are recorded once and launched by one call.

A graph has fixed addresses and grids. So there is one graph for each of some batch sizes and each
of a few bounds on the context. A step is copied into the buffers of the smallest graph that fits.
With adapters there are two graphs of each: with adapters and without. Steps that compute prompts
have other graphs (`mixed_steps`); the model computes every other step without graphs.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..core.attention_backend import (
    AttentionBackend,
    CountsDecodes,
    LayerCache,
    SkipsPadding,
)
from ..core.config import EngineConfig
from ..core.kv_cache_groups import ONE_GROUP, KVLayout
from ..kernels.triton.dependent_launch import DependentLaunches
from ..lora.batch import StaticLoRA
from ..models.base import CausalModel, ForwardBatch, SharedModel
from ..models.decoder.decoder import Decoder
from ..models.draft_heads.target import HeadTarget
from .capture import Capture, CudaCapture, MeteredCapture, Run, SharedLogits, at_least
from .mixed_steps import MixedSizes, MixedSteps, StaticMixedBatch
from .static_batch import StaticBatch

logger = logging.getLogger(__name__)

# Above this size only every LARGE_STEP-th size is captured: padding costs little there.
SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LARGE_STEP = 128
# Upper bounds on contexts: the grids of attention grow with the bound.
CONTEXTS = (1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """The batch sizes and the bounds on contexts for which there are graphs, both ascending."""

    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]

    @classmethod
    def up_to(cls, max_num_seqs: int, max_model_len: int) -> "CaptureSizes":
        sizes = [size for size in SMALL_SIZES if size < max_num_seqs]
        sizes += range(SMALL_SIZES[-1] + LARGE_STEP, max_num_seqs, LARGE_STEP)
        contexts = [length for length in CONTEXTS if length < max_model_len]
        return cls((*sizes, max_num_seqs), (*contexts, max_model_len))

    def top(self) -> "CaptureSizes":
        """The two largest sizes with the longest context."""
        return CaptureSizes(self.batch_sizes[-2:], self.contexts[-1:])

    def batch_size(self, count: int) -> int | None:
        """The smallest size for `count` sequences; None if there is none."""
        return at_least(self.batch_sizes, count)

    def context(self, length: int) -> int | None:
        return at_least(self.contexts, length)


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """Buffers for steps with prompts, and the sizes to record."""

    sizes: MixedSizes
    buffers: StaticMixedBatch


class GraphedModel:
    """A model whose steps over `caches` are replayed: pure decodes, and with `mixed` short steps
    with prompts. Each step overwrites the logits of the one before. The constructor captures all
    graphs, the largest first, because they share memory."""

    def __init__(
        self,
        model: CausalModel,
        caches: Sequence[LayerCache],
        sizes: CaptureSizes,
        batch: StaticBatch,
        capture: Capture,
        mixed: MixedBatch | None = None,
    ) -> None:
        self._model, self._caches = model, caches
        self.vocab_size, self.kv_shapes = model.vocab_size, model.kv_shapes
        self._sizes, self._batch = sizes, batch
        self._dependent_launches = _dependent_launches(model)
        self._logits = SharedLogits()
        self._mixed: MixedSteps | None = None
        if mixed is not None:
            self._mixed = MixedSteps(
                model, caches, mixed.sizes, mixed.buffers, capture, self._logits
            )
        self._graphs = {
            (size, context, adapted): capture(self._step(size, context, adapted))
            for size in reversed(sizes.batch_sizes)
            for context in reversed(sizes.contexts)
            for adapted in batch.kinds
        }

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        logits = self._replayed(batch) if caches is self._caches else None
        return self._model.forward(batch, caches) if logits is None else logits

    def _replayed(self, batch: ForwardBatch) -> torch.Tensor | None:
        """The logits of a step; None if it has no graph."""
        if not _only_decodes(batch):
            return None if self._mixed is None else self._mixed.forward(batch)
        size = self._sizes.batch_size(len(batch.input_ids))
        context = self._sizes.context(batch.metadata.max_seq_len)
        if size is None or context is None or not self._batch.takes(batch):
            return None
        self._batch.fill(batch, size)
        return self._graphs[size, context, batch.lora is not None]()[: len(batch.input_ids)]

    def _step(self, size: int, context: int, adapted: bool) -> Run:
        view = self._batch.view(size, context, adapted)
        launches = self._dependent_launches.chosen(size)

        def run() -> torch.Tensor:
            with self._dependent_launches.during(launches):
                return self._logits.keep(self._model.forward(view, self._caches))

        return run


def _only_decodes(batch: ForwardBatch) -> bool:
    """Whether every sequence of the batch has one token, and its logits are wanted."""
    count, metadata = len(batch.input_ids), batch.metadata
    sequences = metadata.num_decodes == len(metadata.seq_lens)
    return sequences and metadata.num_decodes == count == len(batch.logits_rows)


def _dependent_launches(model: CausalModel) -> DependentLaunches:
    """The model's own settings, or defaults."""
    own = model.dependent_launches if isinstance(model, Decoder) else None
    return own or DependentLaunches()


@dataclass(frozen=True, slots=True)
class DecodeRecorder:
    """The inputs for recording a model's steps over `caches`.

    Contexts have up to `max_model_len` tokens. With `lora` None, no decodes with adapters are
    recorded. With `every_row` steps return the rows of all their tokens.
    """

    model: CausalModel
    attention: AttentionBackend
    caches: Sequence[LayerCache]
    config: EngineConfig
    max_model_len: int
    lora: StaticLoRA | None = None
    layout: KVLayout = ONE_GROUP
    every_row: bool = False

    @property
    def device(self) -> torch.device:
        return self.caches[0][0].device

    @property
    def sizes(self) -> CaptureSizes:
        return CaptureSizes.up_to(self.config.max_num_seqs, self.max_model_len)

    def static_batch(self) -> StaticBatch:
        blocks = -(-self.max_model_len // self.config.block_size)
        return StaticBatch(self.config.max_num_seqs, blocks, self.device, self.lora, self.layout)

    def mixed_batch(self) -> MixedBatch | None:
        """Buffers for steps with prompts; None if these cannot be recorded."""
        if self.config.deterministic or not isinstance(self.attention, CountsDecodes):
            return None
        if any(shape.latent for shape in self.model.kv_shapes):
            return None
        config = self.config
        sizes = MixedSizes.up_to(config.max_num_batched_tokens, self.max_model_len)
        if not sizes.tokens:
            return None
        blocks = -(-self.max_model_len // config.block_size)
        buffers = StaticMixedBatch(
            sizes.tokens[-1],
            config.max_num_seqs,
            blocks,
            self.device,
            self.layout,
            self.every_row,
        )
        return MixedBatch(sizes, buffers)

    def record(
        self,
        sizes: CaptureSizes,
        batch: StaticBatch,
        capture: Capture,
        mixed: MixedBatch | None = None,
    ) -> GraphedModel:
        with torch.inference_mode():
            return GraphedModel(self.model, self.caches, sizes, batch, capture, mixed)

    def refusal(self) -> str | None:
        """Why decodes cannot be recorded; None if they can."""
        if self.config.enforce_eager:
            return "enforce_eager is set"
        if self.device.type != "cuda":
            return "there is no CUDA device"
        if not isinstance(self.attention, SkipsPadding):
            return f"attention backend {self.attention.name} cannot be recorded"
        if not isinstance(self.model, Decoder) or not self.model.can_be_recorded:
            return "the model waits for the device within a step"
        return None


def record_graphs(recorder: DecodeRecorder) -> CausalModel:
    """Returns the model with its decodes recorded, or the model itself and a log that says why."""
    model = recorder.model
    if isinstance(model, SharedModel):
        with model.recording(recorder.max_model_len, keep=True):
            return model.with_part(record_graphs(_of_part(recorder, model)))
    reason = recorder.refusal()
    if reason is not None:
        if recorder.device.type == "cuda":
            logger.info("no CUDA graphs", extra={"reason": reason})
        return model
    sizes, mixed = recorder.sizes, recorder.mixed_batch()
    graphed = recorder.record(sizes, recorder.static_batch(), CudaCapture(), mixed)
    logger.info(
        "CUDA graphs recorded",
        extra={
            "sizes": sizes.batch_sizes,
            "contexts": sizes.contexts,
            "lora": recorder.lora is not None,
            "tokens": () if mixed is None else mixed.sizes.tokens,
        },
    )
    return graphed


def _of_part(recorder: DecodeRecorder, model: SharedModel) -> DecodeRecorder:
    return replace(recorder, model=model.part, every_row=isinstance(model, HeadTarget))


def measure_graphs(recorder: DecodeRecorder) -> int:
    """Estimates the bytes that `record_graphs` will take of this process's device.

    It records the largest step with prompts and the two largest decodes and drops them. The caches
    may have any size, because nothing reads or writes them.

    Returns 0 if nothing is recorded. Processes that share a model do this together.
    """
    model, device = recorder.model, recorder.device
    if isinstance(model, SharedModel):
        with model.recording(recorder.max_model_len, keep=False):
            return measure_graphs(_of_part(recorder, model))
    if recorder.refusal() is not None:
        return 0
    metered = MeteredCapture(CudaCapture(), lambda: free_bytes(device))
    sizes, batch = recorder.sizes, recorder.static_batch()
    mixed, num_bytes = recorder.mixed_batch(), batch.num_bytes
    steps = len(sizes.batch_sizes) * len(sizes.contexts) * len(batch.kinds)
    if mixed is None:
        recorder.record(sizes.top(), batch, metered)
    else:
        recorder.record(sizes.top(), batch, metered, replace(mixed, sizes=mixed.sizes.top()))
        steps, num_bytes = steps + mixed.sizes.count, num_bytes + mixed.buffers.num_bytes
    return num_bytes + metered.extrapolated(steps)


def free_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device."""
    return int(torch.cuda.mem_get_info(device)[0])
