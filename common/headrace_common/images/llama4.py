"""Images of Llama 4: tiles of the image, row by row, then the whole image as one tile."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..wire.images import Grid
from .family import FamilyFiles
from .layout import ImageFormat, PromptTokens

IMAGE, BEGIN, END = "<|image|>", "<|image_start|>", "<|image_end|>"
TILE_END, ROW_END = "<|tile_x_separator|>", "<|tile_y_separator|>"
Channels = tuple[float, float, float]


# Without slots, for the cached property.
@dataclass(frozen=True, kw_only=True)
class Llama4Images(ImageFormat):
    """The ImageFormat of Llama 4.

    A tile has a side of `tile` pixels and `tile_tokens` of `image_token`; there are at most `most`
    tiles beside the whole image. An image is enlarged as far as the tiles allow if `enlarged`, else
    not beyond one tile. Values of pixels from 0 to 1 are normalised by `mean` and `std`.
    `placeholder` is -1 without a tokenizer.
    """

    placeholder: int
    image_token: int
    tokens: PromptTokens
    tile: int
    tile_tokens: int
    most: int
    enlarged: bool
    mean: Channels
    std: Channels

    @classmethod
    def from_files(cls, files: FamilyFiles) -> "Llama4Images":
        processor, vision = files.image_processor, files.config.get("vision_config") or {}
        tile = int((processor.get("size") or {}).get("height", 336))
        patches = (tile // int(vision.get("patch_size", 14))) ** 2
        placeholder, image_token = files.tokens.find(IMAGE), files.image_token()
        red, green, blue = map(float, processor.get("image_mean") or (0.5, 0.5, 0.5))
        std_red, std_green, std_blue = map(float, processor.get("image_std") or (0.5, 0.5, 0.5))
        return cls(
            placeholder=-1 if placeholder is None else placeholder,
            image_token=200_092 if image_token is None else image_token,
            tokens=files.tokens,
            tile=tile,
            tile_tokens=patches // round(float(vision.get("pixel_shuffle_ratio", 0.5)) ** -2),
            most=int(processor.get("max_patches", 16)),
            enlarged=bool(processor.get("resize_to_max_canvas", False)),
            mean=(red, green, blue),
            std=(std_red, std_green, std_blue),
        )

    def grid(self, width: int, height: int) -> Grid:
        """The number of tiles with the whole image, and of rows and columns of the others; 1 each
        if one tile has all."""
        rows, columns = self.canvas(width, height)
        return (rows * columns + 1 if rows * columns > 1 else 1, rows, columns)

    def token_ids(self, grid: Grid) -> Sequence[int]:
        tiles, rows, columns = grid
        tile, ids = [self.image_token] * self.tile_tokens, [self.tokens[BEGIN]]
        if tiles > 1:
            row = ([*tile, self.tokens[TILE_END]] * columns)[:-1]
            ids += [*row, self.tokens[ROW_END]] * rows
        return [*ids, self.tokens[IMAGE], *tile, self.tokens[END]]

    def canvas(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the tiles that the image needs the smallest change for. If it fits
        into several, those that it must be enlarged for the least, or with `enlarged` the most."""
        scales = {
            (rows, columns): min(
                _single(columns * self.tile / width), _single(rows * self.tile / height)
            )
            for rows, columns in self._canvases
        }
        larger = [scale for scale in scales.values() if scale >= 1]
        if larger:
            chosen = max(larger) if self.enlarged else min(larger)
        else:
            chosen = max(scales.values())
        found = [canvas for canvas, scale in scales.items() if scale == chosen]
        return min(found, key=math.prod)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height that the image is resized to within its canvas."""
        rows, columns = self.canvas(width, height)
        wide, high = columns * self.tile, rows * self.tile
        if not self.enlarged:
            wide, high = min(max(width, self.tile), wide), min(max(height, self.tile), high)
        across, down = wide / width, high / height
        if across < down:
            return wide, max(min(math.floor(height * across), high), 1)
        return max(min(math.floor(width * down), wide), 1), high

    @cached_property
    def _canvases(self) -> tuple[tuple[int, int], ...]:
        counts = range(1, self.most + 1)
        return tuple((rows, columns) for rows in counts for columns in counts[: self.most // rows])


def _single(value: float) -> float:
    """Rounds to single precision, in which transformers compares scales."""
    return ctypes.c_float(value).value
