"""Loads the native decoder from a checkpoint: fused on CPUs with native kernels, else in torch."""

import logging
from dataclasses import replace

from ..attention.cpu import CpuBackend
from ..errors import ConfigError
from ..kernels.ops import NativeOps
from .base import CausalModel
from .checkpoint import Checkpoint
from .config import ModelConfig
from .context import pick_context
from .decoder_weights import read_weights
from .determinism import check_deterministic
from .fused import FusedDecoder, fits
from .hidden_states import HEAD, HiddenStateReader, HiddenStates, without_head
from .kv_scales import read_kv_scales
from .layout import TensorLayout
from .linear_maker import NO_INT8, OwnLevels, computes_natively
from .loading import LoadProgress
from .norm_fusion import make_decoder
from .parallel import WeightCuts
from .parallel_decoder import ParallelDecoder
from .positions import PositionTables
from .quantization.base import QuantizedFormat
from .quantization.registry import find_format
from .random_weights import Grouped, RandomReader
from .registry import LoadedModel, Placement
from .tensor_files import scan
from .weights import EMBEDDING, WeightReader

logger = logging.getLogger(__name__)


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    """Raises ConfigError or CheckpointError naming the field, file or tensor that is wrong."""
    config = ModelConfig.from_hf(checkpoint)
    rope, drawn = config.rope, placement.load_format == "dummy"
    length = pick_context(
        placement.positions, config.max_position_embeddings, rope.rope_type, rope.parameters
    )
    layout = TensorLayout(config)
    if config.text_part and not drawn:
        config = _with_stored_head(config, checkpoint, layout)
    if placement.cache_dtype is not None and not drawn:
        config = _with_kv_scales(config, checkpoint, layout)
    stored = find_format(checkpoint, placement.quantization, placement.device)
    if placement.deterministic:
        float8 = stored is not None and not stored.whole_numbers
        check_deterministic(config, placement, _is_fused(config, placement), float8)
    eight = placement.quantization == "int8" or (stored is not None and stored.whole_numbers)
    with LoadProgress() as progress:
        shard = placement.shard
        cuts = None if shard is None else WeightCuts(config, shard)
        where = (checkpoint.folder, placement.dtype, placement.device)
        source = (*where, layout.locate, progress, stored, cuts)
        if not placement.hidden_states:
            reader = _random_reader(placement, cuts, stored) if drawn else WeightReader(*source)
            model = _make(config, reader, placement, length, eight)
            return LoadedModel(model, length, config.windows)
        states = HiddenStateReader(*source, config)
        bare = _make(without_head(config), states, placement, length, eight)
        return LoadedModel(HiddenStates(bare, config.vocab_size), length, config.windows)


def _random_reader(
    placement: Placement, cuts: WeightCuts | None, stored: QuantizedFormat | None
) -> RandomReader:
    float8 = stored is not None and stored.name == "fp8"
    grouped = stored if isinstance(stored, Grouped) else None
    return RandomReader(placement.dtype, placement.device, cuts, float8, grouped)


def _with_stored_head(
    config: ModelConfig, checkpoint: Checkpoint, layout: TensorLayout
) -> ModelConfig:
    """A multimodal config.json says twice whether the output matrix is tied, not always the same;
    the files know."""
    tied = layout.locate(HEAD).stored not in scan(checkpoint.folder)
    return replace(config, tie_word_embeddings=tied)


def _with_kv_scales(
    config: ModelConfig, checkpoint: Checkpoint, layout: TensorLayout
) -> ModelConfig:
    scales = read_kv_scales(checkpoint.folder, config.num_layers, layout.locate)
    reason = "the checkpoint has none, 1 is used" if scales is None else "of the checkpoint"
    logger.info("scales of keys and values", extra={"reason": reason})
    return replace(config, kv_scales=scales)


def _make(
    config: ModelConfig, reader: WeightReader, placement: Placement, length: int, eight: bool
) -> CausalModel:
    ops, positions = placement.ops, PositionTables(config, length, placement.device)
    native = computes_natively(ops, placement.dtype)
    takes_eight = native or isinstance(ops, OwnLevels)
    if placement.quantization == "int8" and not takes_eight:
        raise ConfigError(NO_INT8)
    if isinstance(ops, NativeOps) and _is_fused(config, placement):
        return FusedDecoder(config, reader, positions, ops, placement.attention, eight)
    # Where layers of few bits are the ops' own, no others become so unless they are to.
    weights = read_weights(
        config, reader, ops, eight if native else placement.quantization == "int8"
    )
    if placement.shard is not None:
        return ParallelDecoder(
            config,
            weights,
            positions,
            ops,
            placement.attention,
            shard=placement.shard,
            embeddings=reader.whole_shape(EMBEDDING)[0],
        )
    return make_decoder(config, weights, positions, ops, placement.attention)


def _is_fused(config: ModelConfig, placement: Placement) -> bool:
    """Whether the native kernels can compute whole steps of this decoder."""
    attention = placement.attention
    return (
        placement.shard is None
        and isinstance(attention, CpuBackend)
        and fits(config, attention, placement.dtype)
    )
