"""Loads the native decoder from a checkpoint: fused on CPUs with native kernels, otherwise in
torch."""

import logging
from dataclasses import replace

from ..attention.cpu import CpuBackend
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import ModelConfig
from ..checkpoints.loading import LoadProgress
from ..checkpoints.tensor_files import scan
from ..core.errors import ConfigError
from ..operators.cpu import NativeOps
from .base import CausalModel
from .context import pick_context
from .decoder.decoder_weights import read_weights
from .decoder.fused import FusedDecoder, fits
from .decoder.norm_fusion import make_decoder
from .decoder.parallel_decoder import ParallelDecoder
from .decoder.positions import PositionTables
from .determinism import check_deterministic
from .hidden_states import HEAD, HiddenStateReader, HiddenStates, without_head
from .layout import TensorLayout
from .linear.linear_maker import NO_INT8, QuantizedOps, computes_natively
from .parallel import WeightCuts
from .quantization.base import QuantizedFormat
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
    rope, dummy = config.rope, options.load_format == "dummy"
    length = pick_context(
        options.positions, config.max_position_embeddings, rope.rope_type, rope.parameters
    )
    layout = TensorLayout(config)
    if config.text_part and not dummy:
        config = _with_stored_head(config, checkpoint, layout)
    if options.cache_dtype is not None and not dummy:
        config = _with_kv_scales(config, checkpoint, layout)
    stored = find_format(checkpoint, options.quantization, options.device)
    if options.deterministic:
        float8 = stored is not None and not stored.integer_weights
        check_deterministic(config, options, _is_fused(config, options), float8)
    eight = options.quantization == "int8" or (stored is not None and stored.integer_weights)
    with LoadProgress() as progress:
        shard = options.shard
        cuts = None if shard is None else WeightCuts(config, shard)
        where = (checkpoint.folder, options.dtype, options.device)
        source = (*where, layout.locate, progress, stored, cuts)
        if not options.hidden_states:
            reader = _random_reader(options, cuts, stored) if dummy else WeightReader(*source)
            model = _make(config, reader, options, length, eight)
            return LoadedModel(model, length, config.windows, config.chunked)
        states = HiddenStateReader(*source, config)
        bare = _make(without_head(config), states, options, length, eight)
        found = HiddenStates(bare, config.vocab_size)
        return LoadedModel(found, length, config.windows, config.chunked)


def _random_reader(
    options: LoadOptions, cuts: WeightCuts | None, stored: QuantizedFormat | None
) -> RandomReader:
    float8 = stored is not None and stored.name == "fp8"
    grouped = stored if isinstance(stored, Grouped) else None
    return RandomReader(options.dtype, options.device, cuts, float8, grouped)


def _with_stored_head(
    config: ModelConfig, checkpoint: Checkpoint, layout: TensorLayout
) -> ModelConfig:
    """Corrects whether the output matrix is tied: a multimodal config.json may contradict itself,
    the files are right."""
    tied = layout.locate(HEAD).stored not in scan(checkpoint.folder)
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
    native = computes_natively(ops, options.dtype)
    takes_eight = native or isinstance(ops, QuantizedOps)
    if options.quantization == "int8" and not takes_eight:
        raise ConfigError(NO_INT8)
    if isinstance(ops, NativeOps) and _is_fused(config, options):
        return FusedDecoder(config, reader, positions, ops, options.attention, eight)
    # Operators with their own quantised layers quantise other layers only if asked to.
    weights = read_weights(config, reader, ops, eight if native else options.quantization == "int8")
    if options.shard is not None:
        return ParallelDecoder(
            config,
            weights,
            positions,
            ops,
            options.attention,
            shard=options.shard,
            embeddings=reader.whole_shape(EMBEDDING)[0],
        )
    return make_decoder(config, weights, positions, ops, options.attention)


def _is_fused(config: ModelConfig, options: LoadOptions) -> bool:
    """Whether the native kernels can compute whole steps of this decoder."""
    attention = options.attention
    return (
        options.shard is None
        and isinstance(attention, CpuBackend)
        and fits(config, attention, options.dtype)
    )
