"""The tokens that stand for an image in a prompt, as a family of models counts them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import HeadraceError
from ..wire.images import ImageSpan


class ImageError(HeadraceError):
    """An image that cannot be read, or that the model cannot take; the message says why."""

    code = "image_invalid"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """What replaces the placeholder of one image: its tokens, and its grid of patches.

    The grid is as in ImageSpan.
    """

    token_ids: Sequence[int]
    grid: tuple[int, int, int]


class ImageFormat(Protocol):
    """How a model reads images.

    The chat template writes the token `placeholder` once for each image.
    """

    @property
    def placeholder(self) -> int: ...

    def layout(self, width: int, height: int) -> ImageLayout:
        """The tokens of an image of this size in pixels. Raises ImageError."""


class PlaceholderMismatch(HeadraceError):
    """The prompt has another number of placeholders than images."""

    code = "image_placeholders"


def expand(
    placeholder: int, prompt: Sequence[int], images: Sequence[tuple[bytes, ImageLayout]]
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Replaces each placeholder by the tokens of its image, given by digest and layout, in order.

    Returns the prompt and where the images are in it. Raises PlaceholderMismatch.
    """
    found = prompt.count(placeholder)
    if found != len(images):
        raise PlaceholderMismatch(f"the prompt has {found} places for {len(images)} images")
    remaining = iter(images)
    ids: list[int] = []
    spans = []
    for token_id in prompt:
        if token_id != placeholder:
            ids.append(token_id)
            continue
        digest, layout = next(remaining)
        length = len(layout.token_ids)
        spans.append(ImageSpan(digest=digest, start=len(ids), length=length, grid=layout.grid))
        ids += layout.token_ids
    return ids, tuple(spans)
