"""Images of PaliGemma, in ColPali: each is a square, and as many tokens as any other."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..wire.images import Grid
from .family import FamilyFiles
from .layout import ImageFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class PaliGemmaImages(ImageFormat):
    """The ImageFormat of PaliGemma: `side` x `side` patches, each a token."""

    placeholder: int
    side: int

    @classmethod
    def from_files(cls, files: FamilyFiles) -> "PaliGemmaImages":
        vision = files.config.get("vision_config") or {}
        found = files.image_token("<image>")
        return cls(
            placeholder=256_000 if found is None else found,
            side=int(vision.get("image_size", 224)) // int(vision.get("patch_size", 14)),
        )

    def grid(self, width: int, height: int) -> Grid:
        return 1, self.side, self.side

    def token_ids(self, grid: Grid) -> Sequence[int]:
        return (self.placeholder,) * self.side**2
