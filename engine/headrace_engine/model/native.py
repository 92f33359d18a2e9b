"""Loads the native decoder from a checkpoint: fused on CPUs with native kernels, else in torch."""

from ..attention.cpu import CpuBackend
from ..errors import ConfigError
from ..kernels.ops import NativeOps
from .base import CausalModel
from .checkpoint import Checkpoint
from .config import ModelConfig
from .context import pick_context
from .decoder import Decoder
from .fused import FusedDecoder, fits
from .registry import LoadedModel, Placement
from .rotary import RotaryTable
from .weights import WeightReader


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    """Raises ConfigError or CheckpointError naming the field, file or tensor that is wrong."""
    config = ModelConfig.from_hf(checkpoint)
    context, rope = config.max_position_embeddings, config.rope
    length = pick_context(placement.positions, context, rope.rope_type, rope.parameters)
    reader = WeightReader(checkpoint.folder, placement.dtype, placement.device)
    rotary = RotaryTable(rope, config.head_dim, context, length, placement.device)
    return LoadedModel(_make(config, reader, rotary, placement), length)


def _make(
    config: ModelConfig, reader: WeightReader, rotary: RotaryTable, placement: Placement
) -> CausalModel:
    attention, quantize = placement.attention, placement.quantization == "int8"
    native = isinstance(attention, CpuBackend) and fits(config, attention, placement.dtype)
    if native and isinstance(placement.ops, NativeOps):
        return FusedDecoder(config, reader, rotary, placement.ops.executor, quantize)
    if quantize:
        raise ConfigError(
            "quantization int8 needs the native CPU kernels and a decoder whose sizes are "
            "multiples of 16: use quantization none"
        )
    return Decoder(config, reader, rotary, placement.ops, attention)
