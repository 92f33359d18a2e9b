"""Makes images into what a vision tower reads, with transformers' image processor."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_common.images.frames import FrameGroup, decode_frames
from headrace_common.images.layout import NO_TOKENS, ImageError, ImageFormat, PromptTokens
from headrace_common.images.llama4 import Llama4Images
from headrace_common.images.llava_onevision import LlavaOnevisionVideo
from headrace_common.wire.images import Grid, ImageSpan

from ...checkpoints.checkpoint import Checkpoint, JsonObject, read_json
from ...core.errors import CheckpointError, RequestError
from ...core.images import Pixels, PromptImage, place_images
from .frames import BICUBIC, Arrays, together, whole_square
from .llama4_tiles import llama4_tiles

if TYPE_CHECKING:
    from PIL.Image import Image

# As many pixels as Pillow opens without a warning.
MAX_PIXELS = 89_478_485


def read_format(checkpoint: Checkpoint, tokens: PromptTokens = NO_TOKENS) -> ImageFormat | None:
    """How the checkpoint reads images; see `image_format`. Raises CheckpointError."""
    from headrace_common.images.formats import FORMAT_FILES, image_format

    processor, preprocessor, video_preprocessor = (
        _optional(checkpoint.folder / name) for name in FORMAT_FILES[1:]
    )
    try:
        return image_format(checkpoint.config, processor, preprocessor, video_preprocessor, tokens)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint.folder}: its image processor's configuration is invalid: {error}"
        ) from error


def _optional(file: Path) -> JsonObject:
    return read_json(file) if file.is_file() else {}


def _check_grid(grid: Grid, span: ImageSpan) -> None:
    if grid != span.grid:
        raise RequestError(
            f"an image has the grid {grid}, but its place in the prompt is for {span.grid}"
        )


class ImageReader:
    """Reads images for one model, in any thread. `merge`, `bidirectional` and `alone` are as
    in ImageFormat."""

    def __init__(self, folder: Path, form: ImageFormat) -> None:
        self._folder, self._form = folder, form
        self.merge, self.bidirectional = form.merge, form.bidirectional
        self.alone = form.alone

    def read(
        self, spans: Sequence[ImageSpan], images: Sequence["Image | FrameGroup[Image]"]
    ) -> tuple[PromptImage, ...]:
        """The images and groups of frames of a prompt, in RGB. Raises RequestError if one cannot be
        read."""
        pixels = [
            self.frame_pixels(span, image)
            if isinstance(image, FrameGroup)
            else self.pixels(span, image)
            for span, image in zip(spans, images, strict=True)
        ]
        return self.place(spans, pixels)

    def place(
        self, spans: Sequence[ImageSpan], pixels: Sequence[Pixels]
    ) -> tuple[PromptImage, ...]:
        """The images of a prompt, of which the pixels are known."""
        return place_images(zip(spans, pixels, strict=True), self.merge)

    def decode(self, span: ImageSpan, data: bytes) -> Pixels:
        """The pixels of an encoded image, or a group of a video's frames. Raises RequestError if it
        cannot be read."""
        from headrace_common.images.decoding import open_image

        try:
            group = decode_frames(data)
            if group is None:
                return self.pixels(span, open_image(data, MAX_PIXELS))
            frames = [open_image(frame, MAX_PIXELS) for frame in group.frames]
            return self.frame_pixels(span, group.of(frames))
        except ImageError as error:
            raise RequestError(f"an image cannot be read: {error}") from error

    def pixels(self, span: ImageSpan, image: "Image") -> Pixels:
        """The pixels of an image in RGB. Raises RequestError if it cannot be read."""
        try:
            _check_grid(self._form.grid(*image.size), span)
            return Pixels(dict(self._arrays(image)))
        except (ImageError, ValueError) as error:
            raise RequestError(f"an image cannot be read: {error}") from error

    def frame_pixels(self, span: ImageSpan, group: FrameGroup["Image"]) -> Pixels:
        """The pixels of a group of a video's frames in RGB. Raises RequestError if the model reads
        no such group."""
        video, frames, size = self._form.video, group.frames, (group.width, group.height)
        if video is None or not 0 < len(frames) <= video.group:
            raise RequestError(f"the model does not read {len(frames)} frames together")
        _check_grid(video.grid(*size), span)
        resized = [frame.resize(size, resample=BICUBIC) for frame in frames]
        resized += resized[-1:] * (video.group - len(resized))
        options = video.processor_options
        arrays = together([self._processed(frame, options) for frame in resized])
        if isinstance(video, LlavaOnevisionVideo):
            arrays = whole_square(arrays)
        return Pixels(arrays, number=group.number, time=group.time)

    def _arrays(self, image: "Image") -> Arrays:
        if isinstance(self._form, Llama4Images):
            return llama4_tiles(self._form, image)
        return self._processed(image, self._form.processor_options)

    def _processed(self, image: "Image", options: Mapping[str, Any]) -> Arrays:
        made: Arrays = self._processor(images=[image], return_tensors="np", **options)
        return made

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        kind: Any = AutoImageProcessor
        try:
            return kind.from_pretrained(self._folder, backend="pil", trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            raise CheckpointError(f"{self._folder}: no image processor: {error}") from error
