"""Finds how a checkpoint reads images, from its small files."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..text.checkpoint import PREPROCESSOR_FILE, PROCESSOR_FILE, CheckpointFiles, base_config
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

# Makes a family's format from a checkpoint's files; None if they do not say enough.
FamilyReader = Callable[[FamilyFiles], ImageFormat | None]
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
    "smolvlm": Idefics3Images.from_files,
    "llama4": Llama4Images.from_files,
    "llava_onevision": LlavaOnevisionImages.from_files,
    "mistral3": PixtralImages.from_files,
    "qwen2_vl": QwenVLImages.from_files,
    "qwen2_5_vl": QwenVLImages.from_files,
    "qwen3_vl": QwenVLImages.from_files,
    "qwen3_vl_moe": QwenVLImages.from_files,
    "qwen3_5": QwenVLImages.from_files,
    "qwen3_5_moe": QwenVLImages.from_files,
}


def read_image_format(files: CheckpointFiles, tokenizer: Tokenizer) -> ImageFormat | None:
    """How a checkpoint reads images; see `image_format`. Raises TokenizerError, also for a token
    that its images need and the tokenizer does not have."""
    try:
        form = image_format(
            files.json("config.json"),
            files.json(PROCESSOR_FILE),
            files.json(PREPROCESSOR_FILE),
            PromptTokens(
                tokenizer.token_to_id, partial(tokenizer.encode, add_special_tokens=False)
            ),
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
    tokens: PromptTokens,
) -> ImageFormat | None:
    """How a model reads images; None if it reads none, or in a way that is not known here.

    `config`, `processor` and `preprocessor` are its config.json, processor_config.json and
    preprocessor_config.json, empty without the file. `tokens` are the tokenizer's.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    nested = processor.get("image_processor")
    image_processor = nested if isinstance(nested, Mapping) else preprocessor
    if family is None or not image_processor:
        return None
    return family(
        FamilyFiles(
            config=base_config(config),
            processor=processor,
            image_processor=image_processor,
            tokens=tokens,
        )
    )
