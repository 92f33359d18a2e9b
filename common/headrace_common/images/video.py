"""Videos of Qwen-VL and GLM-V: groups of frames, in most families with times between them."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..wire.images import Grid
from .family import FamilyFiles
from .layout import ImageError, VideoFormat
from .patches import enlarged, qwen_numbers, read_numbers, whole_patches

_PAD = "<|video_pad|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedVideo(VideoFormat):
    """Frames are resized to whole patches, `merge` x `merge` of them a token, so that all pixels of
    a video are within bounds. The defaults are those of Qwen3-VL's processor in transformers."""

    placeholder: int
    group: int = 2
    patch_size: int = 16
    merge: int = 2
    min_pixels: int = 128 * 32 * 32
    max_pixels: int = 32 * 32 * 768

    @property
    def processor_options(self) -> Mapping[str, Any]:
        return {"do_resize": False}

    def resized(self, frames: int, width: int, height: int) -> tuple[int, int]:
        if frames < self.group:
            raise ImageError(f"the model reads {self.group} frames of a video together: send more")
        side = self.patch_size * self.merge
        pixels = self.min_pixels, self.max_pixels
        counted = round(frames / self.group) * self.group
        width, height = enlarged(width, height, side)
        return whole_patches(width, height, side, pixels, frames=frames, counted=counted)

    def grid(self, width: int, height: int) -> Grid:
        return 1, height // self.patch_size, width // self.patch_size

    def token_ids(self, grid: Grid) -> Sequence[int]:
        return (self.placeholder,) * (grid[1] * grid[2] // self.merge**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Video(PatchedVideo):
    """Videos of Qwen3-VL and Qwen 3.5: the middle of a group's time stands before it."""

    written: str = "<|vision_start|><|video_pad|><|vision_end|>"

    def text(self, frames: int, fps: float) -> str:
        middles = (
            (first + min(first + self.group, frames) - 1) / fps / 2 for first in self.groups(frames)
        )
        return "".join(f"<{middle:.1f} seconds>{self.written}" for middle in middles)


def qwen3_video(files: FamilyFiles) -> Qwen3Video | None:
    """How Qwen3-VL and Qwen 3.5 read videos; None without a processor or a token for them."""
    placeholder = files.config.get("video_token_id")
    if not files.video_processor or not isinstance(placeholder, int):
        return None
    return Qwen3Video(placeholder=placeholder, **read_numbers(files.video_processor, "group"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Video(PatchedVideo):
    """Videos of Qwen2-VL and Qwen2.5-VL: all groups stand after each other, and their positions
    tell the time. Bounds of pixels are those of a frame. In Qwen2.5-VL a second has
    `positions_per_second`; None: each group takes the next position."""

    written: str = "<|vision_start|><|video_pad|><|vision_end|>"
    patch_size: int = 14
    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 28 * 28 * 768
    positions_per_second: float | None

    def text(self, frames: int, fps: float) -> str:
        return self.written.replace(_PAD, _PAD * len(self.groups(frames)))

    def times(self, groups: int, fps: float) -> Sequence[int]:
        each = self.positions_per_second
        if each is None:
            return range(groups)
        step = _single(each * _single(self.group / fps))
        return [int(_single(number * step)) for number in range(groups)]

    def resized(self, frames: int, width: int, height: int) -> tuple[int, int]:
        pixels = self.min_pixels, self.max_pixels
        return whole_patches(width, height, self.patch_size * self.merge, pixels)


def _single(number: float) -> float:
    """Rounds to single precision, in which times are computed in training and in transformers."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


def qwen2_video(files: FamilyFiles) -> Qwen2Video | None:
    """How Qwen2-VL and Qwen2.5-VL read videos; None without a token for them. Without a processor
    for videos that for images says how."""
    placeholder = files.config.get("video_token_id")
    if not isinstance(placeholder, int):
        return None
    each = None
    if files.config.get("model_type") == "qwen2_5_vl":
        vision = files.config.get("vision_config") or {}
        each = float(vision.get("tokens_per_second", 4))
    numbers = qwen_numbers(files.video_processor or files.image_processor, "group")
    return Qwen2Video(placeholder=placeholder, positions_per_second=each, **numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmVideo(PatchedVideo):
    """Videos of GLM-4.1V, GLM-4.5V and GLM-4.6V: the time of a group's first frame, in whole
    seconds unless `precise`, stands after it. Frames have the placeholder of images."""

    written: str = "<|video|>"
    patch_size: int = 14
    min_pixels: int = 112 * 112
    max_pixels: int = 28 * 28 * 2 * 30000
    precise: bool

    def text(self, frames: int, fps: float) -> str:
        firsts = [first / fps for first in self.groups(frames)]
        return "".join(
            "<|begin_of_image|><|image|><|end_of_image|>"
            + (f"{time:.1f} seconds" if self.precise else str(int(time)))
            for time in firsts
        )


def glm_video(files: FamilyFiles, placeholder: int) -> GlmVideo | None:
    """How the families of GLM-V read videos; None without a processor for them."""
    if not files.video_processor:
        return None
    precise = files.config.get("model_type") == "glm46v"
    return GlmVideo(
        placeholder=placeholder, precise=precise, **read_numbers(files.video_processor, "group")
    )
