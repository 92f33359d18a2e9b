"""Images of GLM-4.1V and GLM-4.6V: those of Qwen-VL with other bounds; small ones are enlarged."""

from dataclasses import dataclass

from .family import FamilyFiles
from .patches import enlarged, read_numbers
from .qwen_vl import QwenVLImages
from .video import glm_video


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4vImages(QwenVLImages):
    """The ImageFormat of these families. The defaults are those of transformers' processor."""

    frames: int = 2
    min_pixels: int = 112 * 112
    max_pixels: int = 28 * 28 * 15000

    @classmethod
    def from_files(cls, files: FamilyFiles) -> "Glm4vImages | None":
        placeholder = files.image_token("<|image|>")
        if placeholder is None:
            return None
        video = glm_video(files, placeholder)
        numbers = read_numbers(files.image_processor, "frames")
        return cls(placeholder=placeholder, video=video, **numbers)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        width, height = enlarged(width, height, self.patch_size * self.merge)
        return QwenVLImages.resized(self, width, height)  # slots leave super() without its class
