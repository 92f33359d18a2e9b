"""Chooses the implementation of a checkpoint's model. Implementations are imported on first use."""

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ..checkpoints.architectures import ARCHITECTURES, MULTIMODAL, RECURRENT
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.tensor_info import TensorInfo
from ..core.attention_backend import AttentionBackend
from ..core.config import EngineConfig, LoadFormat
from ..core.errors import ConfigError, ContextTooLong
from ..operators.base import Ops
from .base import CausalModel
from .draft_heads.base import DraftHead, HeadOptions
from .encoder.encoder_families import encoder_family
from .parallel import Shard

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Where and how a model computes. `positions` is the longest context it must serve, or None for
    the checkpoint's own. With `hidden_states` the model returns those instead of logits. `shard` is
    the part of the model that this process holds; None: all of it. `cache_dtype` is the dtype of
    stored KV; None: `dtype`. `draft_head` is the head to load with it. With `enable_lora` steps may
    have adapters. `tensors` are the checkpoint's stored tensors, if their headers are already
    read."""

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
    draft_head: HeadOptions | None = None
    enable_lora: bool = False
    tensors: Mapping[str, TensorInfo] | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and its properties.

    `windows` has one entry for each layer: the number of keys that a position sees, including its
    own, or None if it sees all. It is empty for a model without KV. With `chunked` a position sees
    only the keys since the last multiple of that number. With a `draft_head`, `model` is a
    HeadTarget.
    """

    model: CausalModel
    max_model_len: int
    windows: tuple[int | None, ...] = ()
    chunked: bool = False
    draft_head: DraftHead | None = None


class Loader(Protocol):
    def __call__(self, checkpoint: Checkpoint, options: LoadOptions) -> LoadedModel: ...


# Architecture -> module and function of its native implementation.
NATIVE: dict[str, tuple[str, str]] = dict.fromkeys(
    (*ARCHITECTURES, *MULTIMODAL), ("headrace_engine.models.native", "load")
)
NATIVE |= dict.fromkeys(RECURRENT, ("headrace_engine.models.hybrid.hybrid", "load"))
TRANSFORMERS = ("headrace_engine.models.transformers.transformers_model", "load")
ENCODER = ("headrace_engine.models.encoder.transformers_encoder", "load")


def check_code(checkpoint: Checkpoint) -> None:
    """Raises ConfigError if only code in the checkpoint (`auto_map`) could compute the model.

    That code is never imported. `auto_map` alone does not matter: native models and those that
    transformers has need no such code.
    """
    code = checkpoint.config.get("auto_map")
    if not code or checkpoint.architecture in NATIVE:
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = checkpoint.config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"{checkpoint.folder / 'config.json'}: {checkpoint.architecture} (model_type {kind!r}) "
            "is known neither here nor to the installed transformers, and auto_map names code of "
            "the checkpoint, which is never run; use a checkpoint in the format of transformers, "
            "or an architecture of docs/models.md"
        )


def load_model(config: EngineConfig, checkpoint: Checkpoint, options: LoadOptions) -> LoadedModel:
    """Loads the weights. Raises ConfigError or CheckpointError naming what cannot be served."""
    check_code(checkpoint)
    wanted, name = config.model_implementation, checkpoint.architecture
    native = wanted != "transformers" and name in NATIVE
    if options.load_format == "dummy" and not native:
        raise ConfigError(
            f"load_format dummy needs a native model, and {name} is none: use load_format auto"
        )
    if options.deterministic and not native:
        raise ConfigError(
            f"deterministic needs a native model, and {name} would be served through transformers: "
            "serve it without deterministic"
        )
    if options.draft_head is not None and not native:
        raise ConfigError(
            f"speculative_config.method {options.draft_head.method} needs a native model, and "
            f"{name} is none: use method ngram or draft_model"
        )
    if wanted == "transformers" and checkpoint.is_gguf:
        raise ConfigError(
            f"model_implementation transformers does not read GGUF, which {checkpoint.folder} is: "
            "use auto or native"
        )
    if wanted == "native" and name not in NATIVE:
        raise ConfigError(
            f"model_implementation native has no {name}; it has {', '.join(NATIVE)}. "
            "Use auto or transformers"
        )
    if wanted == "transformers" or name not in NATIVE:
        encodes = options.hidden_states and encoder_family(checkpoint) is not None
        return _loader(ENCODER if encodes else TRANSFORMERS)(checkpoint, options)
    try:
        return load_native(checkpoint, options)
    except ContextTooLong:
        raise
    except ConfigError as error:
        # transformers would refuse these too, with a less precise message.
        quantized = options.quantization != "none" or checkpoint.quantization_config
        unread = quantized or checkpoint.is_gguf
        if wanted == "native" or unread or name in RECURRENT or _is_bound(options):
            raise
        logger.warning("native model refused, transformers is used", extra={"reason": str(error)})
        return _loader(TRANSFORMERS)(checkpoint, options)


def load_native(checkpoint: Checkpoint, options: LoadOptions) -> LoadedModel:
    """Loads the native implementation. Raises ConfigError or CheckpointError."""
    return _loader(NATIVE[checkpoint.architecture])(checkpoint, options)


def _is_bound(options: LoadOptions) -> bool:
    """Whether the options need a native model."""
    return options.deterministic or options.shard is not None or options.draft_head is not None


def _loader(entry: tuple[str, str]) -> Loader:
    module, attribute = entry
    loader: Loader = getattr(importlib.import_module(module), attribute)
    return loader
