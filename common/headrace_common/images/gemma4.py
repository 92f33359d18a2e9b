"""Images and videos of Gemma 4: resized to as many patches as fit, in proportion; squares of
patches are tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..wire.images import Grid
from .family import FamilyFiles
from .layout import ImageError, ImageFormat, VideoFormat, clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Images(ImageFormat):
    """The ImageFormat of Gemma 4. `begin` and `end` are the tokens around an image, which has at
    most `most` of `placeholder`. A token is `pooled` x `pooled` patches of `patch_size` pixels.
    `seen` says that tokens of an image see those after them, in layers with a window."""

    placeholder: int
    begin: int
    end: int
    most: int
    patch_size: int
    pooled: int
    seen: bool
    video: VideoFormat | None = None

    @classmethod
    def from_files(cls, files: FamilyFiles) -> "Gemma4Images | None":
        config, processor = files.config, files.image_processor
        if not config.get("vision_config"):
            return None
        placeholder, text = files.image_token(), config.get("text_config") or {}
        images = cls(
            placeholder=258_880 if placeholder is None else placeholder,
            begin=int(config.get("boi_token_id", 255_999)),
            end=int(config.get("eoi_token_id", 258_882)),
            most=int(processor.get("max_soft_tokens", 280)),
            patch_size=int(processor.get("patch_size", 16)),
            pooled=int(processor.get("pooling_kernel_size", 3)),
            seen=text.get("use_bidirectional_attention") == "vision",
        )
        if not files.video_processor:
            return images
        frames = replace(
            images,
            placeholder=int(config.get("video_token_id", 258_884)),
            most=int(files.video_processor.get("max_soft_tokens", 70)),
        )
        return replace(images, video=Gemma4Video(placeholder=frames.placeholder, frames=frames))

    @property
    def bidirectional(self) -> bool:
        return self.seen

    def grid(self, width: int, height: int) -> Grid:
        side = self.pooled * self.patch_size
        factor = math.sqrt(self.most * side**2 / (height * width))
        rows = math.floor(factor * height / side)
        columns = math.floor(factor * width / side)
        if not rows:
            rows, columns = 1, min(width // height, self.most)
        elif not columns:
            rows, columns = min(height // width, self.most), 1
        if not 0 < rows * columns <= self.most:
            raise ImageError(f"{width} x {height} pixels cannot be resized")
        return 1, rows * self.pooled, columns * self.pooled

    def token_ids(self, grid: Grid) -> Sequence[int]:
        count = grid[1] * grid[2] // self.pooled**2
        return (self.begin, *[self.placeholder] * count, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Video(VideoFormat):
    """Videos of Gemma 4: each of `frames` is an image with fewer tokens, after its time in minutes
    and seconds."""

    placeholder: int
    frames: Gemma4Images
    written: str = "<|video|>"
    group: int = 1

    @property
    def processor_options(self) -> Mapping[str, Any]:
        return {"do_resize": False, "max_soft_tokens": self.frames.most}

    def text(self, frames: int, fps: float) -> str:
        return " ".join(f"{clock(number / fps)} {self.written}" for number in range(frames))

    def resized(self, frames: int, width: int, height: int) -> tuple[int, int]:
        _, rows, columns = self.frames.grid(width, height)
        return columns * self.frames.patch_size, rows * self.frames.patch_size

    def grid(self, width: int, height: int) -> Grid:
        return 1, height // self.frames.patch_size, width // self.frames.patch_size

    def token_ids(self, grid: Grid) -> Sequence[int]:
        return self.frames.token_ids(grid)
