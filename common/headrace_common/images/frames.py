"""Frames of a video that a model's tower reads together, as one image of a prompt.

They are stored and named as an image is. The encoded form says the size that frames are resized
to, which depends on the whole video: equal frames of another video may have another size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from .layout import ImageError, ImageLayout, VideoFormat

# No image begins so.
_MAGIC = b"\x00headrace-frames\x00"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameGroup:
    """Encoded images, and the `width` and `height` in pixels that they are resized to."""

    width: int
    height: int
    frames: Sequence[bytes]

    def encode(self) -> bytes:
        """The bytes that stand for an image's."""
        packed: bytes = msgpack.packb([self.width, self.height, list(self.frames)])
        return _MAGIC + packed


def group_frames(
    form: VideoFormat, frames: Sequence[bytes], width: int, height: int
) -> tuple[list[FrameGroup], ImageLayout]:
    """The groups of a video's frames, which have this size in pixels, and the layout of each.
    Raises ImageError."""
    wide, high = form.resized(len(frames), width, height)
    groups = [
        FrameGroup(width=wide, height=high, frames=frames[first : first + form.group])
        for first in form.groups(len(frames))
    ]
    return groups, form.layout(wide, high)


def decode_frames(data: bytes) -> FrameGroup | None:
    """Inverse of FrameGroup.encode; None for an image. Raises ImageError."""
    if not data.startswith(_MAGIC):
        return None
    try:
        width, height, frames = msgpack.unpackb(data[len(_MAGIC) :])
    except (ValueError, msgpack.UnpackException) as error:
        raise ImageError("its frames are damaged") from error
    return FrameGroup(width=width, height=height, frames=frames)
