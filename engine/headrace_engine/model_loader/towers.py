"""Decides whether a model reads images, and loads its vision tower."""

import logging

import torch

from headrace_common.images.formats import FAMILIES

from ..checkpoints.checkpoint import Checkpoint
from ..core.config import EngineConfig
from ..core.errors import ConfigError
from ..models.base import CausalModel
from ..models.decoder.decoder import Decoder
from ..models.decoder.fused import FusedDecoder
from ..models.encoder.dual_encoder import DualEncoder
from ..models.encoder.late_encoder import LateEncoder
from ..models.hidden_states import HiddenStates
from ..models.hybrid.decoder import HybridDecoder
from ..models.transformers.transformers_model import TransformersModel
from ..models.vision.image_reader import read_format
from ..models.vision.tower import VisionTower, load_tower

# Families whose decoder is transformers', also where images are in its prompts.
_WITHOUT_NATIVE_DECODER = frozenset({"gemma4"})

logger = logging.getLogger(__name__)


def pick_tower(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: CausalModel,
    dtype: torch.dtype,
    device: torch.device,
) -> VisionTower | None:
    """Loads the model's vision tower; None if it reads no images.

    Raises ConfigError if images are asked for and cannot be read, and the errors of `load_tower`.
    """
    asked = config.limit_mm_per_prompt.get("image")
    if asked == 0:
        return None
    form = read_format(checkpoint)
    reason = _refusal(config, checkpoint, model, form is not None)
    if reason is None and form is not None:
        return load_tower(checkpoint, form, dtype, device)
    if asked is not None:
        raise ConfigError(f"limit_mm_per_prompt: {reason}: set image to 0")
    if checkpoint.config.get("model_type") in FAMILIES:
        logger.info("the model reads text only", extra={"reason": reason})
    return None


def _refusal(
    config: EngineConfig, checkpoint: Checkpoint, model: CausalModel, known: bool
) -> str | None:
    """Why the model reads no images; None if it reads them. `known`: its format is known."""
    if checkpoint.config.get("model_type") not in FAMILIES:
        return f"{checkpoint.architecture} has no vision tower that is supported"
    decoder = model.decoder if isinstance(model, HiddenStates) else model
    decoders: tuple[type, ...] = (Decoder, FusedDecoder, HybridDecoder, DualEncoder, LateEncoder)
    if checkpoint.config["model_type"] in _WITHOUT_NATIVE_DECODER:
        decoders += (TransformersModel,)
    reasons = {
        "the checkpoint has no preprocessor_config.json": not known,
        "images need the native decoder": not isinstance(decoder, decoders),
        "images cannot be computed with deterministic": config.deterministic,
        "an engine that reads images cannot sleep (enable_sleep_mode)": config.enable_sleep_mode,
        "load_format dummy loads no vision tower": config.load_format == "dummy",
        "images cannot be computed with a draft model or a draft head": (
            config.has_draft_model or config.draft_head is not None
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
