"""Which implementation serves a checkpoint. Implementations are imported only when used."""

import importlib
import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from ..attention.base import AttentionBackend
from ..config import EngineConfig
from ..errors import ConfigError
from .base import CausalModel
from .checkpoint import Checkpoint
from .ops import Ops

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a model computes. `positions` is the longest context it must serve, or None
    for the checkpoint's own."""

    device: torch.device
    dtype: torch.dtype
    attention: AttentionBackend
    ops: Ops
    positions: int | None
    quantization: str = "none"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: CausalModel
    max_model_len: int


class Loader(Protocol):
    def __call__(self, checkpoint: Checkpoint, placement: Placement) -> LoadedModel: ...


# Architecture -> module and function of its native implementation.
NATIVE: dict[str, tuple[str, str]] = dict.fromkeys(
    ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    ("headrace_engine.model.native", "load"),
)
TRANSFORMERS = ("headrace_engine.model.transformers_model", "load")


def load_model(config: EngineConfig, checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    """Loads the weights. Raises ConfigError or CheckpointError naming what cannot be served."""
    wanted, name = config.model_implementation, checkpoint.architecture
    if wanted == "native" and name not in NATIVE:
        raise ConfigError(
            f"model_implementation native has no {name}; it has {', '.join(NATIVE)}. "
            "Use auto or transformers"
        )
    if wanted == "transformers" or name not in NATIVE:
        return _loader(TRANSFORMERS)(checkpoint, placement)
    try:
        return _loader(NATIVE[name])(checkpoint, placement)
    except ConfigError as error:
        if wanted == "native":
            raise
        logger.warning("native model refused, transformers is used", extra={"reason": str(error)})
        return _loader(TRANSFORMERS)(checkpoint, placement)


def _loader(entry: tuple[str, str]) -> Loader:
    module, attribute = entry
    loader: Loader = getattr(importlib.import_module(module), attribute)
    return loader
