"""Images of Mistral 3, whose tower is Pixtral's: a token of its own ends each row of tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..wire.images import Grid
from .family import FamilyFiles
from .layout import ImageError, ImageFormat, PromptTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralImages(ImageFormat):
    """The ImageFormat of Mistral 3. A token is `merged` x `merged` patches of `patch_size` pixels;
    an image is at most `longest` pixels high and wide. `row_end` and `end` are the names of the
    tokens after a row and after the last one."""

    placeholder: int
    tokens: PromptTokens
    patch_size: int
    merged: int
    longest: tuple[int, int]
    row_end: str
    end: str

    @classmethod
    def from_files(cls, files: FamilyFiles) -> "PixtralImages":
        config, processor = files.config, files.processor
        vision = config.get("vision_config") or {}
        size = files.image_processor.get("size") or {"longest_edge": 1024}
        edge = size.get("longest_edge")
        placeholder = files.image_token()
        return cls(
            placeholder=10 if placeholder is None else placeholder,
            tokens=files.tokens,
            patch_size=int(processor.get("patch_size") or vision.get("patch_size", 16)),
            merged=int(processor.get("spatial_merge_size") or config.get("spatial_merge_size", 2)),
            longest=(edge, edge) if edge else (int(size["height"]), int(size["width"])),
            row_end=str(processor.get("image_break_token", "[IMG_BREAK]")),
            end=str(processor.get("image_end_token", "[IMG_END]")),
        )

    @property
    def processor_options(self) -> Mapping[str, Any]:
        return {"patch_size": self.patch_size * self.merged}

    def grid(self, width: int, height: int) -> Grid:
        ratio = max(height / self.longest[0], width / self.longest[1])
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not (height and width):
            raise ImageError("one side is too short for the other")
        side = self.patch_size * self.merged
        rows, columns = -(-height // side), -(-width // side)
        if rows == columns == 1:  # transformers fails for a single token
            raise ImageError(
                f"{width} x {height} pixels are too few: send more than {side} x {side}"
            )
        return 1, rows * self.merged, columns * self.merged

    def token_ids(self, grid: Grid) -> Sequence[int]:
        rows, columns = grid[1] // self.merged, grid[2] // self.merged
        row = [self.placeholder] * columns + [self.tokens[self.row_end]]
        return (row * rows)[:-1] + [self.tokens[self.end]]
