"""Loads the native decoder from a checkpoint: fused on CPUs with native kernels, otherwise in
torch."""

import logging
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import replace
from functools import partial

from ..attention.cpu import CpuBackend
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import ModelConfig
from ..checkpoints.loading import LoadProgress
from ..checkpoints.tensor_files import scan
from ..checkpoints.tensor_info import TensorInfo
from ..core.errors import ConfigError
from ..kernels.cpu.blocks import KINDS
from ..operators.base import DependentOps
from ..operators.cpu import NativeOps
from .base import CausalModel
from .context import pick_context
from .decoder.decoder import Decoder
from .decoder.decoder_weights import read_weights
from .decoder.fused import FusedDecoder, fits
from .decoder.parallel_decoder import ParallelDecoder
from .decoder.positions import PositionTables
from .determinism import check_deterministic
from .draft_heads.base import DraftHead, HeadOptions
from .draft_heads.eagle3 import EagleConfig
from .draft_heads.loading import (
    HeadSource,
    check_mtp,
    fused_target,
    load_eagle3,
    load_mtp,
    tapped_target,
)
from .draft_heads.target import HeadTarget
from .hidden_states import HEAD, HiddenStateReader, HiddenStates, read_projection, without_head
from .layout import TensorLayout
from .linear.linear_maker import QuantizedOps, computes_natively, quantizes
from .parallel import WeightCuts, place_experts
from .quantization.base import QuantizedFormat
from .quantization.gguf import GGUF
from .quantization.registry import find_format
from .registry import LoadedModel, LoadOptions
from .weights.kv_scales import read_kv_scales
from .weights.random_weights import Grouped, RandomReader
from .weights.weights import EMBEDDING, WeightReader

logger = logging.getLogger(__name__)


def load(checkpoint: Checkpoint, options: LoadOptions) -> LoadedModel:
    """Loads the decoder. Raises ConfigError or CheckpointError naming the wrong field, file or
    tensor."""
    config = ModelConfig.from_hf(checkpoint)
    if options.shard is not None:
        config = place_experts(config, options.shard)
    rope = config.rope
    if options.draft_head is not None and options.hidden_states:
        raise ConfigError(
            f"speculative_config is given, but {checkpoint.folder} is an embedding model, which "
            "writes no tokens: leave it out"
        )
    length = pick_context(
        options.positions, config.max_position_embeddings, rope.rope_type, rope.parameters
    )
    dummy = options.load_format == "dummy"
    stored = find_format(checkpoint, options.quantization, options.device)
    tensors = _stored_tensors(checkpoint, options)
    layout = TensorLayout(config, tensors)
    if options.draft_head is not None:
        _check_head(options.draft_head, checkpoint, config, layout, tensors)
    if config.multimodal and not dummy:
        config = _with_stored_head(config, tensors, layout)
    if options.cache_dtype is not None and not dummy:
        config = _with_kv_scales(config, checkpoint, layout)
    if isinstance(stored, GGUF):
        stored = _gguf(stored, options)
    if options.deterministic:
        floats = stored is not None and not stored.integer_weights
        float8 = floats and not isinstance(stored, GGUF)
        check_deterministic(config, options, _is_fused(config, options), float8)
    eight = options.quantization == "int8" or (stored is not None and stored.integer_weights)
    with LoadProgress() as progress:
        shard = options.shard
        cuts = None if shard is None else WeightCuts(config, shard)
        where = (checkpoint.folder, options.dtype, options.device)
        source = (*where, layout.locate, progress, stored, cuts, tensors)
        if options.draft_head is not None:
            files = (checkpoint, tensors, options.dtype, options.device, layout.locate)
            quantize = quantizes(options.ops, options.dtype, options.quantization, eight)
            made_by = (progress, stored, options.ops, options.attention)
            parts = HeadSource(*files, *made_by, quantize, length, shard)
            states, whole = HiddenStateReader(*source, config), partial(WeightReader, *source)
            target, made = _with_head(
                options.draft_head, config, states, whole, parts, options, eight
            )
            return LoadedModel(target, length, config.windows, config.chunked, made)
        if not options.hidden_states:
            reader = _random_reader(options, cuts, stored) if dummy else WeightReader(*source)
            model = _make(config, reader, options, length, eight)
            return LoadedModel(model, length, config.windows, config.chunked)
        states = HiddenStateReader(*source, config)
        bare = _make(without_head(config), states, options, length, eight)
        projection = read_projection(
            checkpoint, tensors, config.hidden_size, options.dtype, options.device, shard
        )
        found = HiddenStates(bare, config.vocab_size, projection)
        return LoadedModel(found, length, config.windows, config.chunked)


def _stored_tensors(checkpoint: Checkpoint, options: LoadOptions) -> Mapping[str, TensorInfo]:
    """The tensors in the checkpoint's files; none if no file is read."""
    if options.tensors is not None:
        return options.tensors
    reads = options.load_format != "dummy" or options.hidden_states or options.draft_head
    return scan(checkpoint.folder) if reads else {}


def _gguf(stored: GGUF, options: LoadOptions) -> GGUF:
    integers = isinstance(options.ops, QuantizedOps)
    kept: Collection[str] = ("Q8_0", "Q4_0") if integers else ()
    if computes_natively(options.ops, options.dtype) and options.quantization != "int8":
        kept = KINDS if options.shard is None else ()
    whole = [kind for kind in stored.types if kind not in kept]
    if whole:
        logger.info("GGUF matrices are dequantised at load", extra={"types": whole})
    return stored.packed() if integers else stored


def _with_head(
    head: HeadOptions,
    config: ModelConfig,
    states: HiddenStateReader,
    whole: Callable[[], WeightReader],
    parts: HeadSource,
    options: LoadOptions,
    eight: bool,
) -> tuple[HeadTarget, DraftHead]:
    """A decoder as a target, and its head. `states` reads the decoder without its output matrix, a
    reader that `whole` makes with it."""
    if head.checkpoint is None:
        bare = _make(without_head(config), states, options, parts.length, eight)
        return load_mtp(config, bare, parts)
    taps = EagleConfig.of(head.checkpoint, config).taps
    if isinstance(options.ops, NativeOps) and _is_fused(config, options):
        positions = PositionTables(config, parts.length, options.device)
        fused = FusedDecoder(
            without_head(config), states, positions, options.ops, options.attention, eight, taps
        )
        tapped = fused_target(config, fused, parts)
    else:
        weights = read_weights(config, whole(), options.ops, parts.quantize)
        tapped = tapped_target(config, weights, parts, taps)
    return load_eagle3(config, tapped, parts, head.checkpoint, head.quantization)


def _check_head(
    head: HeadOptions,
    checkpoint: Checkpoint,
    config: ModelConfig,
    layout: TensorLayout,
    stored: Container[str],
) -> None:
    """Raises ConfigError if there is no head, or it does not fit the decoder."""
    if head.method == "mtp":
        check_mtp(checkpoint, config, layout.locate, stored)
    elif config.latent is not None:
        raise ConfigError(
            f"speculative_config.method eagle3 does not support {checkpoint.architecture}, which "
            "attends to latents: use method mtp or ngram"
        )
    elif head.checkpoint is not None:
        EagleConfig.of(head.checkpoint, config)


def _random_reader(
    options: LoadOptions, cuts: WeightCuts | None, stored: QuantizedFormat | None
) -> RandomReader:
    float8 = stored is not None and stored.name == "fp8"
    grouped = stored if isinstance(stored, Grouped) else None
    return RandomReader(options.dtype, options.device, cuts, float8, grouped)


def _with_stored_head(
    config: ModelConfig, stored: Container[str], layout: TensorLayout
) -> ModelConfig:
    """Corrects whether the output matrix is tied: a multimodal config.json may contradict itself,
    the files are right."""
    tied = layout.locate(HEAD).stored not in stored
    return replace(config, tie_word_embeddings=tied)


def _with_kv_scales(
    config: ModelConfig, checkpoint: Checkpoint, layout: TensorLayout
) -> ModelConfig:
    scales = read_kv_scales(checkpoint.folder, config.num_layers, layout.locate)
    source = "none in the checkpoint: 1 is used" if scales is None else "checkpoint"
    logger.info("KV cache scales chosen", extra={"source": source})
    return replace(config, kv_scales=scales)


def _make(
    config: ModelConfig, reader: WeightReader, options: LoadOptions, length: int, eight: bool
) -> CausalModel:
    ops, positions = options.ops, PositionTables(config, length, options.device)
    quantize = quantizes(options.ops, options.dtype, options.quantization, eight)
    if isinstance(ops, NativeOps) and _is_fused(config, options):
        return FusedDecoder(config, reader, positions, ops, options.attention, eight)
    weights = read_weights(config, reader, ops, quantize)
    if options.shard is not None:
        return ParallelDecoder(
            config,
            weights,
            positions,
            ops,
            options.attention,
            shard=options.shard,
            embeddings=reader.whole_shape(EMBEDDING)[0],
            returns_states=isinstance(reader, HiddenStateReader),
        )
    if not isinstance(ops, DependentOps):
        return Decoder(config, weights, positions, ops, options.attention)
    from .decoder.norm_fusion import make_decoder  # imports Triton

    return make_decoder(config, weights, positions, ops, options.attention)


def _is_fused(config: ModelConfig, options: LoadOptions) -> bool:
    """Whether the native kernels can compute whole steps of this decoder."""
    attention = options.attention
    return (
        options.shard is None
        and isinstance(attention, CpuBackend)
        and fits(config, attention, options.dtype)
    )
