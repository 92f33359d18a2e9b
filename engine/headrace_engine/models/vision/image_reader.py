"""Makes images into what a vision tower reads, with transformers' image processor."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from headrace_common.images.layout import NO_TOKENS, ImageError, ImageFormat, PromptTokens
from headrace_common.images.llama4 import Llama4Images
from headrace_common.wire.images import ImageSpan

from ...checkpoints.checkpoint import Checkpoint, JsonObject, read_json
from ...core.errors import CheckpointError, RequestError
from ...core.images import Pixels, PromptImage, place_images
from .llama4_tiles import llama4_tiles

if TYPE_CHECKING:
    from PIL.Image import Image

# As many pixels as Pillow opens without a warning.
MAX_PIXELS = 89_478_485


def read_format(checkpoint: Checkpoint, tokens: PromptTokens = NO_TOKENS) -> ImageFormat | None:
    """How the checkpoint reads images; see `image_format`. Raises CheckpointError."""
    from headrace_common.images.formats import image_format

    files = [_optional(checkpoint.folder / name) for name in _FILES]
    try:
        return image_format(checkpoint.config, files[0], files[1], tokens)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint.folder}: its image processor's configuration is invalid: {error}"
        ) from error


_FILES = ("processor_config.json", "preprocessor_config.json")


def _optional(file: Path) -> JsonObject:
    return read_json(file) if file.is_file() else {}


class ImageReader:
    """Reads images for one model, in any thread. `merge`, `bidirectional` and `alone` are as
    in ImageFormat."""

    def __init__(self, folder: Path, form: ImageFormat) -> None:
        self._folder, self._form = folder, form
        self.merge, self.bidirectional = form.merge, form.bidirectional
        self.alone = form.alone

    def read(
        self, spans: Sequence[ImageSpan], images: Sequence["Image"]
    ) -> tuple[PromptImage, ...]:
        """The images of a prompt, in RGB. Raises RequestError if one cannot be read."""
        return self.place(spans, [self.pixels(*pair) for pair in zip(spans, images, strict=True)])

    def place(
        self, spans: Sequence[ImageSpan], pixels: Sequence[Pixels]
    ) -> tuple[PromptImage, ...]:
        """The images of a prompt, of which the pixels are known."""
        return place_images(zip(spans, pixels, strict=True), self.merge)

    def decode(self, span: ImageSpan, data: bytes) -> Pixels:
        """The pixels of an encoded image. Raises RequestError if it cannot be read."""
        from headrace_common.images.decoding import open_image

        try:
            return self.pixels(span, open_image(data, MAX_PIXELS))
        except ImageError as error:
            raise RequestError(f"an image cannot be read: {error}") from error

    def pixels(self, span: ImageSpan, image: "Image") -> Pixels:
        """The pixels of an image in RGB. Raises RequestError if it cannot be read."""
        try:
            grid = self._form.grid(*image.size)
            if grid != span.grid:
                raise RequestError(
                    f"an image has the grid {grid}, but its place in the prompt is for {span.grid}"
                )
            return Pixels(dict(self._arrays(image)))
        except (ImageError, ValueError) as error:
            raise RequestError(f"an image cannot be read: {error}") from error

    def _arrays(self, image: "Image") -> Mapping[str, npt.NDArray[Any]]:
        if isinstance(self._form, Llama4Images):
            return llama4_tiles(self._form, image)
        options = self._form.processor_options
        made: Mapping[str, npt.NDArray[Any]] = self._processor(
            images=[image], return_tensors="np", **options
        )
        return made

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        kind: Any = AutoImageProcessor
        try:
            return kind.from_pretrained(self._folder, backend="pil", trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            raise CheckpointError(f"{self._folder}: no image processor: {error}") from error
