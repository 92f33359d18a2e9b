"""Images of a prompt: where each one is, and what the vision tower reads of it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from headrace_common.wire.images import ImageSpan


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Pixels:
    """What a vision tower reads of an image: its arguments, by name, as the family's image
    processor makes them. `number` and `time` are as in FrameGroup."""

    arrays: Mapping[str, npt.NDArray[Any]]
    number: int = 0
    time: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image of a prompt; `pixels` are what the vision tower reads.

    In the rotation an image may take fewer positions than it has tokens (M-RoPE). Its rows and
    columns begin at `position`, its frames `pixels.time` after that. `shift`, 0 or below, is added
    to the positions of the tokens after it.
    """

    span: ImageSpan
    pixels: Pixels
    position: int
    shift: int


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The most images of a prompt, the most tokens of one image, and `room` for the tokens of
    encoded images. With `whole` a step computes an image as a whole: its tokens see those after
    them."""

    images: int
    tokens: int
    room: int
    whole: bool = False


def place_images(
    images: Iterable[tuple[ImageSpan, Pixels]], merge: int | None
) -> tuple[PromptImage, ...]:
    """The images of one prompt, in order. With M-RoPE an image or a video takes as many positions
    as its longest side has tokens, each of `merge` x `merge` patches; None: nothing is moved."""
    placed: list[PromptImage] = []
    position = shift = 0
    for span, pixels in images:
        if pixels.number == 0:
            position = span.start + shift
        if merge is not None:
            frames, height, width = span.grid
            longest = max(pixels.time + frames, height // merge, width // merge)
            shift = position + longest - span.end
        placed.append(PromptImage(span, pixels, position, shift))
    return tuple(placed)
