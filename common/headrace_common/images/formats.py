"""Finds how a checkpoint reads images, from its small files."""

from collections.abc import Callable, Mapping
from typing import Any

from .layout import ImageFormat
from .qwen_vl import QwenVLImages

_QWEN_VL = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})


def image_format(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    token_id: Callable[[str], int | None],
) -> ImageFormat | None:
    """How a model reads images; None if it reads none, or in a way that is not known here.

    `config` is its config.json, `processor` its image processor's configuration (see
    `processor_config`). `token_id` returns the id of a special token.
    """
    if config.get("model_type") in _QWEN_VL and processor:
        placeholder = config.get("image_token_id", token_id("<|image_pad|>"))
        if isinstance(placeholder, int):
            return QwenVLImages.from_config(placeholder, processor)
    return None


def processor_config(
    processor: Mapping[str, Any], preprocessor: Mapping[str, Any]
) -> Mapping[str, Any]:
    """An image processor's configuration, from processor_config.json or, where it is not there,
    preprocessor_config.json."""
    nested = processor.get("image_processor")
    return nested if isinstance(nested, Mapping) else preprocessor
