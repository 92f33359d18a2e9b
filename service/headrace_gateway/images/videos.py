"""Videos of a request: frames that were read as images, in the groups that a model reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_common.images.check import ImageSize
from headrace_common.images.frames import FrameGroup
from headrace_common.images.layout import ImageError, ImageLayout, VideoFormat
from headrace_common.wire.images import ImageData

from .data_urls import invalid_video


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadVideo:
    """A video whose frames were decoded. `name` is that of its field, for errors."""

    name: str
    frames: Sequence[tuple[ImageData, ImageSize]]

    def groups(self, form: VideoFormat) -> tuple[list[FrameGroup], ImageLayout]:
        """The groups of frames that a model reads together, and the layout of each. Raises
        ApiError."""
        sizes = {(size.width, size.height) for _, size in self.frames}
        try:
            if len(sizes) > 1:
                raise ImageError("all frames of a video have one size")
            wide, high = form.resized(len(self.frames), *sizes.pop())
        except ImageError as error:
            raise invalid_video(self.name, str(error)) from error
        encoded = [data.encoded for data, _ in self.frames]
        groups = [
            FrameGroup(width=wide, height=high, frames=encoded[first : first + form.group])
            for first in form.groups(len(encoded))
        ]
        return groups, form.layout(wide, high)
