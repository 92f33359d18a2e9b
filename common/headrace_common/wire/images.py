"""Images of a request on the wire: where each is in the prompt, and the digest that names it."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import MessageError

DIGEST_BYTES = 32
# Of one request. A gateway's own limit may be lower.
MAX_IMAGES = 1024
# The longest side of a grid, in patches, and the most frames.
MAX_GRID = 2**16
# Frames, and patches in height and width.
Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class ImageData:
    """An encoded image within one process. Equal images share one object, so it is not copied."""

    encoded: bytes
    content: bytes  # its content_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """An image in a prompt: `length` tokens from the position `start` stand for it.

    Those of them that are the model's placeholder token are replaced by the image's embeddings;
    others, such as the ends of rows, are tokens as usual. `digest` names the encoded image, see
    `image_digest`: caches use it as their key. `grid` is the number of frames, and of patches in
    height and width, before patches are merged. `data` is the image itself in the gateway that read
    it; it is no part of the message.
    """

    digest: bytes
    start: int
    length: int
    grid: Grid
    data: ImageData | None = field(default=None, compare=False, repr=False)

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.length


def image_digest(data: bytes, salt: bytes) -> bytes:
    """The digest that names an encoded image among requests with this cache salt.

    Salts separate tenants: equal images of two tenants have different digests.
    """
    return salted_digest(content_hash(data), salt)


def content_hash(data: bytes) -> bytes:
    """The hash of an encoded image, which is the same for all tenants."""
    return hashlib.sha256(data).digest()


def salted_digest(content: bytes, salt: bytes) -> bytes:
    """The digest of an image with this content hash; see `image_digest`."""
    return hmac.digest(hashlib.sha256(b"image:" + salt).digest(), content, "sha256")


def pack_images(images: Sequence[ImageSpan]) -> list[list[Any]]:
    """The form in which a request has its images."""
    return [[image.digest, image.start, image.length, *image.grid] for image in images]


def unpack_images(raw: object, prompt_tokens: int) -> tuple[ImageSpan, ...]:
    """Inverse of `pack_images`, for a prompt of `prompt_tokens` tokens. Raises MessageError."""
    if not isinstance(raw, list) or len(raw) > MAX_IMAGES:
        raise MessageError(f"images: must be a list of at most {MAX_IMAGES}")
    images = tuple(map(_image, raw))
    end = 0
    for image in images:
        if image.start < end or image.end > prompt_tokens:
            raise MessageError("images: spans must be in order, apart, and within the prompt")
        end = image.end
    return images


def _image(raw: object) -> ImageSpan:
    if not isinstance(raw, list) or len(raw) != 6:
        raise MessageError("images: each has a digest, a start, a length and a grid")
    digest, *numbers = raw
    if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
        raise MessageError(f"images: a digest has {DIGEST_BYTES} bytes")
    if any(type(number) is not int for number in numbers):
        raise MessageError("images: spans and grids are whole numbers")
    start, length, *grid = numbers
    if start < 0 or length < 1 or not all(0 < side <= MAX_GRID for side in grid):
        raise MessageError("images: a span or a grid is out of range")
    frames, height, width = grid
    return ImageSpan(digest=digest, start=start, length=length, grid=(frames, height, width))
