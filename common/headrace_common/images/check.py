"""Checks an image that a client sent. Pillow is imported only where the check runs."""

from dataclasses import dataclass

from .layout import ImageError

# What a process that runs `size_or_fault` may import before.
PRELOAD = ("headrace_common.images.decoding",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSize:
    """The size of an upright image in pixels."""

    width: int
    height: int


def size_or_fault(data: bytes, max_pixels: int) -> ImageSize | str:
    """Decodes the whole image; returns its size, or what is wrong with it."""
    from .decoding import open_image

    try:
        image = open_image(data, max_pixels)
    except ImageError as error:
        return str(error)
    return ImageSize(width=image.width, height=image.height)
