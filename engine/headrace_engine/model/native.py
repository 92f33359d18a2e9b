"""Loads the native decoder from a checkpoint."""

from .checkpoint import Checkpoint
from .config import ModelConfig
from .context import pick_context
from .decoder import Decoder
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
    model = Decoder(config, reader, rotary, placement.ops, placement.attention)
    return LoadedModel(model, length)
