"""The files of a checkpoint that say how its family reads images."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .layout import PromptTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFiles:
    """`config` is config.json, `processor` processor_config.json, or empty, and `image_processor`
    the part of it or of preprocessor_config.json about images. `video_processor` is that about
    videos, or empty. `tokens` are the tokenizer's."""

    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    image_processor: Mapping[str, Any]
    video_processor: Mapping[str, Any]
    tokens: PromptTokens

    def image_token(self, name: str | None = None) -> int | None:
        """The token that embeddings replace, by config.json, or else by `name`; None if neither
        says."""
        found = self.config.get("image_token_id", self.config.get("image_token_index"))
        if found is None and name is not None:
            found = self.tokens.find(name)
        return found if isinstance(found, int) else None
