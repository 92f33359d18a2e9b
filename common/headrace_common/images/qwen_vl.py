"""Images of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: resized to whole patches, 2 x 2 of them a token."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .layout import ImageError, ImageLayout

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVLImages:
    """The ImageFormat of these families. The defaults are those of transformers' processor."""

    placeholder: int
    patch_size: int = 14
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280

    @classmethod
    def from_config(cls, placeholder: int, processor: Mapping[str, Any]) -> "QwenVLImages":
        """Reads an image processor's configuration."""
        size = processor.get("size") or {}
        given = {
            "patch_size": processor.get("patch_size"),
            "merge_size": processor.get("merge_size"),
            "min_pixels": processor.get("min_pixels") or size.get("shortest_edge"),
            "max_pixels": processor.get("max_pixels") or size.get("longest_edge"),
        }
        return cls(placeholder=placeholder, **{k: int(v) for k, v in given.items() if v})

    def layout(self, width: int, height: int) -> ImageLayout:
        resized_width, resized_height = self.resized(width, height)
        grid = (1, resized_height // self.patch_size, resized_width // self.patch_size)
        tokens = grid[1] * grid[2] // self.merge_size**2
        return ImageLayout(token_ids=(self.placeholder,) * tokens, grid=grid)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height that the image is resized to. Raises ImageError.

        Both are multiples of a token's side, the ratio stays nearly the same, and the pixels are
        within the bounds. Rounds as transformers does (halves to even numbers).
        """
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise ImageError(
                f"{width} x {height} pixels: one side is over {MAX_ASPECT_RATIO} times as long as "
                "the other"
            )
        side = self.patch_size * self.merge_size
        wide, high = round(width / side) * side, round(height / side) * side
        if wide * high > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            wide = max(side, math.floor(width / shrink / side) * side)
            high = max(side, math.floor(height / shrink / side) * side)
        elif wide * high < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            wide = math.ceil(width * grow / side) * side
            high = math.ceil(height * grow / side) * side
        return wide, high
