"""Images of Gemma 3: each is a square, and as many tokens as any other."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..wire.images import Grid
from .family import FamilyFiles
from .layout import ImageFormat

BEGIN = "<start_of_image>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Images(ImageFormat):
    """The ImageFormat of Gemma 3, without pan-and-scan. `placeholder` begins an image, `end` ends
    it, and `tokens` of `image_token` are between them."""

    placeholder: int
    image_token: int
    end: int
    tokens: int

    @classmethod
    def from_files(cls, files: FamilyFiles) -> "Gemma3Images":
        config = files.config
        return cls(
            placeholder=int(config.get("boi_token_index", 255_999)),
            image_token=int(config.get("image_token_index", 262_144)),
            end=int(config.get("eoi_token_index", 256_000)),
            tokens=int(config.get("mm_tokens_per_image", 256)),
        )

    @property
    def bidirectional(self) -> bool:
        return True

    @property
    def processor_options(self) -> Mapping[str, Any]:
        return {"do_pan_and_scan": False}

    @property
    def rewritten(self) -> tuple[str, str]:
        return BEGIN, f"\n\n{BEGIN}\n\n"

    def grid(self, width: int, height: int) -> Grid:
        side = math.isqrt(self.tokens)
        return 1, side, side

    def token_ids(self, grid: Grid) -> Sequence[int]:
        return (self.placeholder, *[self.image_token] * self.tokens, self.end)
