"""Decodes images with Pillow: PNG, JPEG, WebP, and the first frame of GIF.

A client's bytes are decoded in a process that may be killed. The size in the header is checked
before memory is taken for pixels.
"""

import io
import warnings

from PIL import (
    GifImagePlugin,
    Image,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from .layout import ImageError

# The readers that are used. Pillow would import all others for a format that it does not know yet.
READERS = (GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def open_image(data: bytes, max_pixels: int) -> Image.Image:
    """The upright image in RGB, as transformers reads it. Raises ImageError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged metadata, and a size that is checked here
        return _upright(_opened(data, max_pixels))


def _opened(data: bytes, max_pixels: int) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ImageError("it is not a PNG, JPEG, WebP or GIF") from error
    except Image.DecompressionBombError as error:
        raise _too_large(None, max_pixels) from error
    except Exception as error:  # Pillow's readers raise many kinds
        raise _damaged(error) from error
    if image.width * image.height > max_pixels:
        raise _too_large(image, max_pixels)
    return image


def _upright(image: Image.Image) -> Image.Image:
    try:
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # as above
        raise _damaged(error) from error


def _too_large(image: Image.Image | None, max_pixels: int) -> ImageError:
    size = "it has" if image is None else f"{image.width} x {image.height} pixels are"
    return ImageError(f"{size} more than {max_pixels} pixels; send a smaller one")


def _damaged(error: Exception) -> ImageError:
    return ImageError(f"it is damaged: {str(error)[:200] or type(error).__name__}")
