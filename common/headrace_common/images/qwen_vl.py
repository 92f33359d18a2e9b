"""Images of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen 3.5: resized to whole patches, 2 x 2 of them a
token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..wire.images import Grid
from .family import FamilyFiles
from .layout import ImageFormat, VideoFormat
from .patches import qwen_numbers, whole_patches
from .video import qwen2_video, qwen3_video


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVLImages(ImageFormat):
    """The ImageFormat of these families. The defaults are those of transformers' processor.

    An image counts as `frames` equal ones when its pixels are compared with the bounds.
    """

    placeholder: int
    patch_size: int = 14
    merge: int = 2
    frames: int = 1
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    video: VideoFormat | None = None

    @classmethod
    def from_files(cls, files: FamilyFiles) -> "QwenVLImages | None":
        """Reads an image processor's configuration; None if there is no placeholder."""
        placeholder = files.image_token("<|image_pad|>")
        if placeholder is None:
            return None
        numbers = qwen_numbers(files.image_processor, "frames") | {"frames": 1}
        return cls(placeholder=placeholder, **numbers)

    @classmethod
    def of_qwen2(cls, files: FamilyFiles) -> "QwenVLImages | None":
        """The same, with videos of Qwen2-VL and Qwen2.5-VL."""
        form = cls.from_files(files)
        return None if form is None else replace(form, video=qwen2_video(files))

    @classmethod
    def of_qwen3(cls, files: FamilyFiles) -> "QwenVLImages | None":
        """The same, with videos of Qwen3-VL and Qwen 3.5."""
        form = cls.from_files(files)
        return None if form is None else replace(form, video=qwen3_video(files))

    def grid(self, width: int, height: int) -> Grid:
        resized_width, resized_height = self.resized(width, height)
        return 1, resized_height // self.patch_size, resized_width // self.patch_size

    def token_ids(self, grid: Grid) -> Sequence[int]:
        return (self.placeholder,) * (grid[1] * grid[2] // self.merge**2)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height that the image is resized to. Raises ImageError."""
        side = self.patch_size * self.merge
        pixels = self.min_pixels, self.max_pixels
        return whole_patches(width, height, side, pixels, frames=self.frames)
