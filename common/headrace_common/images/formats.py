"""Finds how a checkpoint reads images, from its small files."""

from collections.abc import Callable, Mapping
from typing import Any

from ..text.checkpoint import PREPROCESSOR_FILE, PROCESSOR_FILE, CheckpointFiles
from ..text.errors import TokenizerError
from ..text.tokenizer import Tokenizer
from .layout import ImageFormat
from .qwen_vl import QwenVLImages

_QWEN_VL = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})


def read_image_format(files: CheckpointFiles, tokenizer: Tokenizer) -> ImageFormat | None:
    """How a checkpoint reads images; see `image_format`. Raises TokenizerError."""
    processor = processor_config(files.json(PROCESSOR_FILE), files.json(PREPROCESSOR_FILE))
    try:
        return image_format(files.json("config.json"), processor, tokenizer.token_to_id)
    except (TypeError, ValueError, AttributeError) as error:
        raise TokenizerError(
            f"{files.origin}: its image processor's configuration is invalid: {error}"
        ) from error


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
