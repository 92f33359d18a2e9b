"""Images of a prompt: where each one is, and what the vision tower reads of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace_common.wire.images import ImageSpan

Patches = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image of a prompt; `patches` [number, elements] are what the vision tower reads.

    In the rotation an image may take fewer positions than it has tokens (M-RoPE): its first one is
    at `position`, and `shift`, 0 or below, is added to the positions of the tokens after it.
    """

    span: ImageSpan
    patches: Patches
    position: int
    shift: int


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The most images of a prompt, and the most tokens of images that are kept encoded."""

    images: int
    tokens: int


def place_images(
    images: Iterable[tuple[ImageSpan, Patches]], merge: int | None
) -> tuple[PromptImage, ...]:
    """The images of one prompt, in order. With M-RoPE an image takes as many positions as its
    longer side has tokens, each of `merge` x `merge` patches; None: positions are not moved."""
    placed: list[PromptImage] = []
    shift = 0
    for span, patches in images:
        position = span.start + shift
        if merge is not None:
            shift += max(span.grid[1:]) // merge - span.length
        placed.append(PromptImage(span, patches, position, shift))
    return tuple(placed)


def image_keys(images: Sequence[PromptImage], begin: int, end: int) -> bytes:
    """Tells the positions [begin, end) of a prompt from those with other images: their tokens are
    the same. Empty without an image there."""
    found = (image.span for image in images)
    return b"".join(
        span.digest + (span.start - begin).to_bytes(8, "little", signed=True)
        for span in found
        if span.start < end and span.end > begin
    )
