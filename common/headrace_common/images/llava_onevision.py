"""Images and videos of LLaVA-OneVision: the whole image as one square, then tiles of it, row by
row; a frame as one square with fewer tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..wire.images import Grid
from .family import FamilyFiles
from .layout import ImageFormat, VideoFormat

# Tiles of transformers' default, in both directions.
MOST_TILES = 6
ASPECT_PREFIX = "anyres_max_"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaOnevisionImages(ImageFormat):
    """The ImageFormat of LLaVA-OneVision.

    A square of `tile` pixels has `side` x `side` tokens. `canvases` are the heights and widths in
    pixels that an image may be resized to, without distortion; the rest is padding, which has no
    tokens. Tokens of more than `most` squares are made fewer. Each row ends with a token of its
    own. An image is read in the same way, whatever other images the prompt has.
    """

    placeholder: int
    tile: int
    side: int
    canvases: tuple[tuple[int, int], ...]
    most: int
    video: VideoFormat | None = None

    @classmethod
    def from_files(cls, files: FamilyFiles) -> "LlavaOnevisionImages | None":
        placeholder = files.image_token("<image>")
        if placeholder is None:
            return None
        processor, vision = files.image_processor, files.config.get("vision_config") or {}
        tile = int(vision.get("image_size", 384))
        side = tile // int(vision.get("patch_size", 14))
        aspect = files.processor.get("vision_aspect_ratio") or files.config.get(
            "vision_aspect_ratio", "anyres_max_9"
        )
        return cls(
            placeholder=placeholder,
            tile=tile,
            side=side,
            canvases=_canvases(processor, tile),
            most=int(str(aspect).removeprefix(ASPECT_PREFIX)),
            video=_video(files.config, tile, side),
        )

    def grid(self, width: int, height: int) -> Grid:
        """Two squares with the rows of the tiles and the tokens of a row, with its end. One square
        with its own rows and columns if the tiles would have only padding."""
        high, wide = self._canvas(width, height)
        rows, columns = high // self.tile * self.side, wide // self.tile * self.side
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        ratio = math.sqrt(rows * columns / (self.most * self.side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return (2, rows, columns + 1) if rows else (1, self.side, self.side)

    def token_ids(self, grid: Grid) -> Sequence[int]:
        squares, rows, columns = grid
        return (self.placeholder,) * (self.side**2 + (rows * columns if squares > 1 else 0))

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        """Height and width of the canvas that keeps the most pixels, and has the least padding."""

        def kept(canvas: tuple[int, int]) -> tuple[int, int]:
            high, wide = canvas
            scale = min(wide / width, high / height)
            pixels = min(int(width * scale) * int(height * scale), width * height)
            return pixels, pixels - high * wide

        return max(self.canvases, key=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaOnevisionVideo(VideoFormat):
    """Videos of LLaVA-OneVision: each frame is resized to a square of `tile` pixels, and has half
    as many tokens as an image's in each direction. A token ends the video."""

    placeholder: int
    tile: int
    side: int
    written: str = "<video>"
    group: int = 1

    @property
    def ended(self) -> bool:
        return True

    @property
    def processor_options(self) -> Mapping[str, Any]:
        return {"image_grid_pinpoints": [[self.tile, self.tile]]}

    def text(self, frames: int, fps: float) -> str:
        return self.written * frames

    def resized(self, frames: int, width: int, height: int) -> tuple[int, int]:
        return self.tile, self.tile

    def grid(self, width: int, height: int) -> Grid:
        side = math.ceil(self.side / 2)
        return 1, side, side

    def token_ids(self, grid: Grid) -> Sequence[int]:
        return (self.placeholder,) * (grid[1] * grid[2])


def _video(config: Mapping[str, Any], tile: int, side: int) -> LlavaOnevisionVideo | None:
    placeholder = config.get("video_token_id", config.get("video_token_index"))
    if not isinstance(placeholder, int):
        return None
    return LlavaOnevisionVideo(placeholder=placeholder, tile=tile, side=side)


def _canvases(processor: Mapping[str, Any], tile: int) -> tuple[tuple[int, int], ...]:
    given = processor.get("image_grid_pinpoints")
    if given is None:
        sides = [tile * count for count in range(1, MOST_TILES + 1)]
        return tuple((high, wide) for high in sides for wide in sides)
    return tuple((int(high), int(wide)) for high, wide in given)
