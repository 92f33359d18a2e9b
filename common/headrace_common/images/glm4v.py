"""Images of GLM-4.1V and GLM-4.6V: those of Qwen-VL with other bounds; small ones are enlarged."""

from dataclasses import dataclass
from typing import Any

from .family import FamilyFiles
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
        processor = files.image_processor
        size = processor.get("size") or {}
        given = {
            "patch_size": processor.get("patch_size"),
            "merge": processor.get("merge_size"),
            "frames": processor.get("temporal_patch_size"),
            "min_pixels": size.get("shortest_edge"),
            "max_pixels": size.get("longest_edge"),
        }
        numbers: dict[str, Any] = {name: int(value) for name, value in given.items() if value}
        video = glm_video(files, placeholder)
        return cls(placeholder=placeholder, video=video, **numbers)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        side = self.patch_size * self.merge
        if min(width, height) < side:
            scale = max(side / height, side / width)
            width, height = int(width * scale), int(height * scale)
        return QwenVLImages.resized(self, width, height)  # slots leave super() without its class
