"""Makes images into the patches that a vision tower reads, with transformers' image processor."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace_common.images.layout import ImageError
from headrace_common.wire.images import ImageSpan

from ...core.errors import CheckpointError, RequestError
from ...core.images import Patches, PromptImage, place_images

if TYPE_CHECKING:
    from PIL.Image import Image

# As many pixels as Pillow opens without a warning.
MAX_PIXELS = 89_478_485


class ImageReader:
    """Reads images for one model, in any thread. `merge` x `merge` patches become a token."""

    def __init__(self, folder: Path, merge: int) -> None:
        self._folder, self.merge = folder, merge

    def read(
        self, spans: Sequence[ImageSpan], images: Sequence["Image"]
    ) -> tuple[PromptImage, ...]:
        """The images of a prompt, in RGB. Raises RequestError if one cannot be read."""
        return self.place(spans, [self.patches(*pair) for pair in zip(spans, images, strict=True)])

    def place(
        self, spans: Sequence[ImageSpan], patches: Sequence[Patches]
    ) -> tuple[PromptImage, ...]:
        """The images of a prompt, of which the patches are known."""
        return place_images(zip(spans, patches, strict=True), self.merge)

    def decode(self, span: ImageSpan, data: bytes) -> Patches:
        """The patches of an encoded image. Raises RequestError if it cannot be read."""
        from headrace_common.images.decoding import open_image

        try:
            return self.patches(span, open_image(data, MAX_PIXELS))
        except ImageError as error:
            raise RequestError(f"an image cannot be read: {error}") from error

    def patches(self, span: ImageSpan, image: "Image") -> Patches:
        """The patches of an image in RGB. Raises RequestError if it cannot be read."""
        try:
            made = self._processor(images=[image], return_tensors="np")
        except ValueError as error:
            raise RequestError(f"an image cannot be read: {error}") from error
        grid = tuple(map(int, made["image_grid_thw"][0]))
        if grid != span.grid:
            raise RequestError(
                f"an image has the grid {grid}, but its place in the prompt is for {span.grid}"
            )
        patches: Patches = np.ascontiguousarray(made["pixel_values"], dtype=np.float32)
        return patches

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        kind: Any = AutoImageProcessor
        try:
            return kind.from_pretrained(self._folder, backend="pil", trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            raise CheckpointError(f"{self._folder}: no image processor: {error}") from error
