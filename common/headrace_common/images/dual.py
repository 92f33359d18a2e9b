"""Images of models that embed texts and images into one space, such as CLIP and SigLIP."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..wire.images import Grid
from .family import FamilyFiles
from .layout import ImageFormat

# The positions of texts and the pixels of images, where config.json leaves them out.
_POSITIONS = {"clip": 77, "siglip": 64}
_IMAGE_SIZE, _PATCH_SIZE = 224, {"clip": 32, "siglip": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class DualImages(ImageFormat):
    """The ImageFormat of these models. An image counts as much as the longest text: it has `length`
    tokens, and it is `side` x `side` patches, whatever its size."""

    placeholder: int
    length: int
    side: int

    @classmethod
    def from_files(cls, files: FamilyFiles) -> "DualImages":
        kind = str(files.config.get("model_type"))
        text, vision = (files.config.get(f"{part}_config") or {} for part in ("text", "vision"))
        size = int(vision.get("image_size", _IMAGE_SIZE))
        return cls(
            placeholder=0,
            length=int(text.get("max_position_embeddings", _POSITIONS[kind])),
            side=size // int(vision.get("patch_size", _PATCH_SIZE[kind])),
        )

    @property
    def alone(self) -> bool:
        return True

    def grid(self, width: int, height: int) -> Grid:
        return 1, self.side, self.side

    def token_ids(self, grid: Grid) -> Sequence[int]:
        return (self.placeholder,) * self.length
