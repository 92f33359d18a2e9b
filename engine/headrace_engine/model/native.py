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
from .decoder import Decoder, read_weights
from .determinism import check_deterministic
from .fused import FusedDecoder, fits
from .hidden_states import HiddenStateReader, HiddenStates, without_head
from .kv_scales import read_kv_scales
from .layout import TensorLayout
from .linear_maker import NO_INT8, OwnLevels, computes_natively
from .loading import LoadProgress
from .parallel import WeightCuts
from .parallel_decoder import ParallelDecoder
from .quantization.base import QuantizedFormat
from .quantization.registry import find_format
from .random_weights import Grouped, RandomReader
from .registry import LoadedModel, Placement
from .rope import RopeConfig
from .rotary import RotaryTable
from .weights import EMBEDDING, WeightReader

logger = logging.getLogger(__name__)


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    """Raises ConfigError or CheckpointError naming the field, file or tensor that is wrong."""
    config = ModelConfig.from_hf(checkpoint)
    rope = config.rope
    length = pick_context(
        placement.positions, config.max_position_embeddings, rope.rope_type, rope.parameters
    )
    layout = TensorLayout(config)
    if placement.cache_dtype is not None and placement.load_format != "dummy":
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
            drawn = placement.load_format == "dummy"
            reader = _random_reader(placement, cuts, stored) if drawn else WeightReader(*source)
            model = _make(config, reader, placement, length, eight)
            return LoadedModel(model, length, _window(config))
        states = HiddenStateReader(*source, config)
        bare = _make(without_head(config), states, placement, length, eight)
        return LoadedModel(HiddenStates(bare, config.vocab_size), length, _window(config))


def _random_reader(
    placement: Placement, cuts: WeightCuts | None, stored: QuantizedFormat | None
) -> RandomReader:
    float8 = stored is not None and stored.name == "fp8"
    grouped = stored if isinstance(stored, Grouped) else None
    return RandomReader(placement.dtype, placement.device, cuts, float8, grouped)


def _with_kv_scales(
    config: ModelConfig, checkpoint: Checkpoint, layout: TensorLayout
) -> ModelConfig:
    scales = read_kv_scales(checkpoint.folder, config.num_layers, layout.locate)
    reason = "the checkpoint has none, 1 is used" if scales is None else "of the checkpoint"
    logger.info("scales of keys and values", extra={"reason": reason})
    return replace(config, kv_scales=scales)


def _window(config: ModelConfig) -> int | None:
    """How many keys any layer sees; None where one sees all."""
    windows = [window for window in config.windows if window is not None]
    return max(windows) if len(windows) == config.num_layers else None


def _make(
    config: ModelConfig, reader: WeightReader, placement: Placement, length: int, eight: bool
) -> CausalModel:
    def table(rope: RopeConfig) -> RotaryTable:
        context = config.max_position_embeddings
        return RotaryTable(rope, config.head_dim, context, length, placement.device)

    rotary, ops = table(config.rope), placement.ops
    native = computes_natively(ops, placement.dtype)
    takes_eight = native or isinstance(ops, OwnLevels)
    if placement.quantization == "int8" and not takes_eight:
        raise ConfigError(NO_INT8)
    local = None if config.local_rope is None else table(config.local_rope)
    if isinstance(ops, NativeOps) and _is_fused(config, placement):
        return FusedDecoder(config, reader, rotary, ops, placement.attention, local, eight)
    # Where layers of few bits are the ops' own, no others become so unless they are to.
    weights = read_weights(
        config, reader, ops, eight if native else placement.quantization == "int8"
    )
    if placement.shard is not None:
        return ParallelDecoder(
            config,
            weights,
            rotary,
            ops,
            placement.attention,
            local,
            shard=placement.shard,
            embeddings=reader.whole_shape(EMBEDDING)[0],
        )
    return Decoder(config, weights, rotary, ops, placement.attention, local)


def _is_fused(config: ModelConfig, placement: Placement) -> bool:
    """Whether the native kernels can compute whole steps of this decoder."""
    attention = placement.attention
    return (
        placement.shard is None
        and isinstance(attention, CpuBackend)
        and fits(config, attention, placement.dtype)
    )
