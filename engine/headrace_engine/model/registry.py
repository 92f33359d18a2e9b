"""Which implementation serves a checkpoint. Implementations are imported only when used."""

import importlib
import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from ..attention.base import AttentionBackend
from ..config import EngineConfig, LoadFormat
from ..errors import ConfigError
from .architectures import ARCHITECTURES, MULTIMODAL
from .base import CausalModel
from .checkpoint import Checkpoint
from .encoder_families import encoder_family
from .ops import Ops
from .parallel import Shard

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a model computes. `positions` is the longest context it must serve, or None
    for the checkpoint's own. With `hidden_states` the model gives those where others give logits.
    `shard` is the part of the model that this process holds; None: all of it. `cache_dtype` is what
    KV is kept in; None: `dtype`.
    """

    device: torch.device
    dtype: torch.dtype
    attention: AttentionBackend
    ops: Ops
    positions: int | None
    quantization: str = "none"
    hidden_states: bool = False
    deterministic: bool = False
    load_format: LoadFormat = "auto"
    shard: Shard | None = None
    cache_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`windows` has one entry a layer: keys that a position sees, its own included, or None. One
    that keeps no KV has none."""

    model: CausalModel
    max_model_len: int
    windows: tuple[int | None, ...] = ()


class Loader(Protocol):
    def __call__(self, checkpoint: Checkpoint, placement: Placement) -> LoadedModel: ...


# Architecture -> module and function of its native implementation.
NATIVE: dict[str, tuple[str, str]] = dict.fromkeys(
    (*ARCHITECTURES, *MULTIMODAL), ("headrace_engine.model.native", "load")
)
TRANSFORMERS = ("headrace_engine.model.transformers_model", "load")
ENCODER = ("headrace_engine.model.transformers_encoder", "load")


def load_model(config: EngineConfig, checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    """Loads the weights. Raises ConfigError or CheckpointError naming what cannot be served."""
    wanted, name = config.model_implementation, checkpoint.architecture
    native = wanted != "transformers" and name in NATIVE
    if placement.load_format == "dummy" and not native:
        raise ConfigError(f"load_format dummy needs a native model, and {name} is none")
    if placement.deterministic and not native:
        raise ConfigError(
            f"deterministic needs a native model, and {name} would be served through transformers: "
            "serve it without deterministic"
        )
    if wanted == "native" and name not in NATIVE:
        raise ConfigError(
            f"model_implementation native has no {name}; it has {', '.join(NATIVE)}. "
            "Use auto or transformers"
        )
    if wanted == "transformers" or name not in NATIVE:
        encodes = placement.hidden_states and encoder_family(checkpoint) is not None
        return _loader(ENCODER if encodes else TRANSFORMERS)(checkpoint, placement)
    try:
        return _loader(NATIVE[name])(checkpoint, placement)
    except ConfigError as error:
        # transformers' path would refuse these too, and say less of why.
        quantized = placement.quantization != "none" or checkpoint.config.get("quantization_config")
        if wanted == "native" or quantized or _is_bound(placement):
            raise
        logger.warning("native model refused, transformers is used", extra={"reason": str(error)})
        return _loader(TRANSFORMERS)(checkpoint, placement)


def _is_bound(placement: Placement) -> bool:
    """Whether it asks for what only native models have."""
    return placement.deterministic or placement.shard is not None


def _loader(entry: tuple[str, str]) -> Loader:
    module, attribute = entry
    loader: Loader = getattr(importlib.import_module(module), attribute)
    return loader
