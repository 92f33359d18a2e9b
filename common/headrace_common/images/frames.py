"""Frames of a video that a model's tower reads together, as one image of a prompt.

They are stored and named as an image is. The encoded form says what else the embeddings and their
positions depend on, such as the size that frames are resized to: equal frames of another video may
have another one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgpack

from .layout import ImageError, ImageLayout, VideoFormat

# An image, encoded or not.
Frame = TypeVar("Frame")
Other = TypeVar("Other")
# No image begins so.
_MAGIC = b"\x00headrace-frames\x00"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameGroup(Generic[Frame]):
    """Frames, and the `width` and `height` in pixels that they are resized to.

    Groups whose positions in the rotation begin with those of their video's first group have a
    `number` in it, and are `time` positions after it; others have 0. With `last` a token that ends
    the video is part of the group.
    """

    width: int
    height: int
    frames: Sequence[Frame]
    number: int = 0
    time: int = 0
    last: bool = False

    @property
    def numbers(self) -> list[Any]:
        """All but the frames."""
        return [self.width, self.height, self.number, self.time, self.last]

    def of(self, frames: Sequence[Other]) -> "FrameGroup[Other]":
        """The same with other frames."""
        return _group(self.numbers, frames)

    def encode(self: "FrameGroup[bytes]") -> bytes:
        """The bytes that stand for an image's."""
        packed: bytes = msgpack.packb([*self.numbers, list(self.frames)])
        return _MAGIC + packed


def group_frames(
    form: VideoFormat, frames: Sequence[Frame], fps: float, width: int, height: int
) -> list[tuple[FrameGroup[Frame], ImageLayout]]:
    """The groups of a video's frames, which have this size in pixels, with the layout of each.
    Raises ImageError."""
    wide, high = form.resized(len(frames), width, height)
    layout, starts = form.layout(wide, high), form.groups(len(frames))
    times = form.times(len(starts), fps)
    # So no position is above the number of tokens before it: there are as many rotations.
    if times and times[-1] > (len(starts) - 1) * len(layout.token_ids):
        raise ImageError(
            f"with {fps:g} frames a second the video takes more than {times[-1]} positions, but "
            f"{form.group} frames have {len(layout.token_ids)} tokens: send more or larger frames"
        )
    groups = [
        FrameGroup(
            width=wide,
            height=high,
            frames=frames[first : first + form.group],
            number=number if times else 0,
            time=times[number] if times else 0,
            last=form.ended and first == starts[-1],
        )
        for number, first in enumerate(starts)
    ]
    return [(group, layout.ended(form.placeholder) if group.last else layout) for group in groups]


def decode_frames(data: bytes) -> FrameGroup[bytes] | None:
    """Inverse of FrameGroup.encode; None for an image. Raises ImageError."""
    if not data.startswith(_MAGIC):
        return None
    try:
        *numbers, frames = msgpack.unpackb(data[len(_MAGIC) :])
        return _group(numbers, frames)
    except (ValueError, msgpack.UnpackException) as error:
        raise ImageError("its frames are damaged") from error


def _group(numbers: Sequence[Any], frames: Sequence[Frame]) -> FrameGroup[Frame]:
    width, height, number, time, last = numbers
    return FrameGroup(
        width=width, height=height, frames=frames, number=number, time=time, last=last
    )
