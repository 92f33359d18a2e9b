"""Images of GLM-4.1V and GLM-4.6V: resized to whole patches, 2 x 2 of them a token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..wire.images import Grid
from .family import FamilyFiles
from .layout import ImageError, ImageFormat
from .qwen_vl import MAX_ASPECT_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4vImages(ImageFormat):
    """The ImageFormat of these families. An image counts as `frames` equal ones when its pixels are
    compared with the bounds. The defaults are those of transformers' processor."""

    placeholder: int
    patch_size: int = 14
    merge: int = 2
    frames: int = 2
    min_pixels: int = 112 * 112
    max_pixels: int = 28 * 28 * 15000

    @classmethod
    def from_files(cls, files: FamilyFiles) -> "Glm4vImages | None":
        placeholder = files.image_token("<|image|>")
        if placeholder is None:
            return None
        processor = files.image_processor
        size = processor.get("size") or {}
        given = {
            "patch_size": processor.get("patch_size"),
            "merge": processor.get("merge_size"),
            "frames": processor.get("temporal_patch_size"),
            "min_pixels": size.get("shortest_edge"),
            "max_pixels": size.get("longest_edge"),
        }
        return cls(placeholder=placeholder, **{k: int(v) for k, v in given.items() if v})

    def grid(self, width: int, height: int) -> Grid:
        wide, high = self._resized(width, height)
        return 1, high // self.patch_size, wide // self.patch_size

    def token_ids(self, grid: Grid) -> Sequence[int]:
        return (self.placeholder,) * (grid[1] * grid[2] // self.merge**2)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height that the image is resized to. Raises ImageError."""
        side = self.patch_size * self.merge
        if min(width, height) < side:
            scale = max(side / height, side / width)
            width, height = int(width * scale), int(height * scale)
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise ImageError(
                f"{width} x {height} pixels: one side is over {MAX_ASPECT_RATIO} times as long as "
                "the other"
            )
        wide, high = round(width / side) * side, round(height / side) * side
        if self.frames * wide * high > self.max_pixels:
            shrink = math.sqrt(self.frames * height * width / self.max_pixels)
            wide = max(side, math.floor(width / shrink / side) * side)
            high = max(side, math.floor(height / shrink / side) * side)
        elif self.frames * wide * high < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (self.frames * height * width))
            wide = math.ceil(width * grow / side) * side
            high = math.ceil(height * grow / side) * side
        return wide, high
