"""Finds how a checkpoint reads images, from its small files."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..text.checkpoint import (
    PREPROCESSOR_FILE,
    PROCESSOR_FILE,
    VIDEO_PREPROCESSOR_FILE,
    CheckpointFiles,
    base_config,
)
from ..text.errors import TokenizerError
from ..text.tokenizer import Tokenizer
from .dual import DualImages
from .family import FamilyFiles
from .gemma3 import Gemma3Images
from .gemma4 import Gemma4Images
from .glm4v import Glm4vImages
from .idefics3 import Idefics3Images
from .layout import ImageFormat, PromptTokens
from .llama4 import Llama4Images
from .llava_onevision import LlavaOnevisionImages
from .paligemma import PaliGemmaImages
from .pixtral import PixtralImages
from .qwen_vl import QwenVLImages
from .smolvlm import smolvlm_images

# Makes a family's format from a checkpoint's files; None if they do not say enough.
FamilyReader = Callable[[FamilyFiles], ImageFormat | None]
# What says how a checkpoint reads images and videos.
FORMAT_FILES = ("config.json", PROCESSOR_FILE, PREPROCESSOR_FILE, VIDEO_PREPROCESSOR_FILE)
# By the model_type of config.json.
FAMILIES: dict[str, FamilyReader] = {
    "clip": DualImages.from_files,
    "colpali": PaliGemmaImages.from_files,
    "colqwen2": QwenVLImages.from_files,
    "gemma3": Gemma3Images.from_files,
    "gemma4": Gemma4Images.from_files,
    "glm4v": Glm4vImages.from_files,
    "glm4v_moe": Glm4vImages.from_files,
    "glm46v": Glm4vImages.from_files,
    "idefics3": Idefics3Images.from_files,
    "siglip": DualImages.from_files,
    "smolvlm": smolvlm_images,
    "llama4": Llama4Images.from_files,
    "llava_onevision": LlavaOnevisionImages.from_files,
    "mistral3": PixtralImages.from_files,
    "qwen2_vl": QwenVLImages.of_qwen2,
    "qwen2_5_vl": QwenVLImages.of_qwen2,
    "qwen3_vl": QwenVLImages.of_qwen3,
    "qwen3_vl_moe": QwenVLImages.of_qwen3,
    "qwen3_5": QwenVLImages.of_qwen3,
    "qwen3_5_moe": QwenVLImages.of_qwen3,
}


def read_image_format(files: CheckpointFiles, tokenizer: Tokenizer) -> ImageFormat | None:
    """How a checkpoint reads images; see `image_format`. Raises TokenizerError, also for a token
    that its images need and the tokenizer does not have."""
    encode = partial(tokenizer.encode, add_special_tokens=False)
    config, processor, preprocessor, video_preprocessor = map(files.json, FORMAT_FILES)
    try:
        form = image_format(
            config,
            processor,
            preprocessor,
            video_preprocessor,
            PromptTokens(tokenizer.token_to_id, encode),
        )
        if form is not None:
            form.token_ids(form.grid(224, 224))
    except (TypeError, ValueError, AttributeError) as error:
        raise TokenizerError(
            f"{files.origin}: its image processor's configuration is invalid: {error}"
        ) from error
    return form


def image_format(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    preprocessor: Mapping[str, Any],
    video_preprocessor: Mapping[str, Any],
    tokens: PromptTokens,
) -> ImageFormat | None:
    """How a model reads images; None if it reads none, or in a way that is not known here.

    The first four are the FORMAT_FILES, empty without the file. `tokens` are the tokenizer's.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    image_processor = _part(processor, "image_processor", preprocessor)
    if family is None or not image_processor:
        return None
    return family(
        FamilyFiles(
            config=base_config(config),
            processor=processor,
            image_processor=image_processor,
            video_processor=_part(processor, "video_processor", video_preprocessor),
            tokens=tokens,
        )
    )


def _part(processor: Mapping[str, Any], name: str, older: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of processor_config.json, or else the file that it was in before."""
    nested = processor.get(name)
    return nested if isinstance(nested, Mapping) else older
