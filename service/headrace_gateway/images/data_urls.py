"""Reads images that are in the request itself, as `data:` URLs."""

import binascii

from ..errors import ApiError, invalid

INVALID = "invalid_image"
# The type and the parameters before the data.
MAX_HEAD_CHARS = 256


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def decode_data_url(url: str, name: str, max_bytes: int) -> bytes:
    """Returns the bytes of an image. Raises ApiError, which calls the field `name`."""
    comma = url.find(",", 0, MAX_HEAD_CHARS)
    head = url[5 : max(comma, 5)].lower()
    if comma < 0 or not head.startswith("image/") or not head.endswith(";base64"):
        raise invalid_image(name, "a data: URL is data:image/png;base64, and then the image")
    if (len(url) - comma - 1) * 3 // 4 > max_bytes + 2:
        raise too_many_bytes(name, max_bytes)
    try:
        data = binascii.a2b_base64(url[comma + 1 :], strict_mode=True)
    except (ValueError, binascii.Error) as error:
        raise invalid_image(name, f"it is not valid base64: {error}") from error
    if len(data) > max_bytes:
        raise too_many_bytes(name, max_bytes)
    return data


def invalid_image(name: str, reason: str) -> ApiError:
    """Returns the error for an image that cannot be used."""
    return invalid(f"{name}: {reason}.", param=name, code=INVALID)


def too_many_bytes(name: str, max_bytes: int) -> ApiError:
    """Returns the error for an image with too many bytes."""
    return invalid_image(name, f"an image has at most {max_bytes} bytes (max_image_bytes)")
