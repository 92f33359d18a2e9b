"""Images and videos of a request that were decoded, and how a model reads them."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_common.images.check import ImageSize
from headrace_common.images.frames import FrameGroup, group_frames
from headrace_common.images.layout import ImageError, ImageFormat, ImageLayout, VideoFormat
from headrace_common.wire.images import ImageData

from .data_urls import invalid_image, invalid_video


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadImage:
    """An image that was decoded. `name` is that of its field, for errors."""

    name: str
    data: ImageData
    size: ImageSize

    def layout(self, form: ImageFormat) -> ImageLayout:
        """Returns its tokens for a model. Raises ApiError."""
        try:
            return form.layout(self.size.width, self.size.height)
        except ImageError as error:
            raise invalid_image(self.name, str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadVideo:
    """A video whose frames were decoded. `name` is that of its field, for errors."""

    name: str
    frames: Sequence[ReadImage]

    def groups(self, form: VideoFormat, fps: float) -> list[tuple[FrameGroup[bytes], ImageLayout]]:
        """The groups of frames that a model reads together, with the layout of each; `fps` frames
        are a second. Raises ApiError."""
        size, *others = {frame.size for frame in self.frames}
        if others:
            raise invalid_video(self.name, "all frames of a video have one size")
        encoded = [frame.data.encoded for frame in self.frames]
        try:
            return group_frames(form, encoded, fps, size.width, size.height)
        except ImageError as error:
            raise invalid_video(self.name, str(error)) from error
