"""Reads images that are in the request itself, as `data:` URLs."""

import binascii

from ..errors import ApiError, invalid

INVALID, INVALID_VIDEO = "invalid_image", "invalid_video"
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
    return _decode(url[comma + 1 :], name, max_bytes)


def decode_frames(url: str, name: str, max_bytes: int, before: int, most: int) -> list[bytes]:
    """Returns the frames of a video, each as JPEG. With `before` images they are at most `most`.

    Raises ApiError, as `decode_data_url` does.
    """
    comma = url.find(",", 0, MAX_HEAD_CHARS)
    if url[: max(comma, 0)].lower() != "data:video/jpeg;base64":
        raise invalid_video(
            name,
            "a video is data:video/jpeg;base64, and then its frames as JPEG in base64, with commas "
            "between them; take the frames out of other files first, such as with ffmpeg",
        )
    count = before + url.count(",")
    if count > most:
        raise too_many(name, count, most)
    return [_decode(frame, name, max_bytes) for frame in url[comma + 1 :].split(",")]


def _decode(encoded: str, name: str, max_bytes: int) -> bytes:
    if len(encoded) * 3 // 4 > max_bytes + 2:
        raise too_many_bytes(name, max_bytes)
    try:
        data = binascii.a2b_base64(encoded, strict_mode=True)
    except (ValueError, binascii.Error) as error:
        raise invalid_image(name, f"it is not valid base64: {error}") from error
    if len(data) > max_bytes:
        raise too_many_bytes(name, max_bytes)
    return data


def invalid_image(name: str, reason: str) -> ApiError:
    """Returns the error for an image that cannot be used."""
    return invalid(f"{name}: {reason}.", param=name, code=INVALID)


def invalid_video(name: str, reason: str) -> ApiError:
    """Returns the error for a video that cannot be used."""
    return invalid(f"{name}: {reason}.", param=name, code=INVALID_VIDEO)


def too_many(name: str, count: int, most: int) -> ApiError:
    """Returns the error for a request with too many images."""
    return invalid(
        f"{name}: {count} images, with frames of videos, are over the limit of {most} "
        "(max_images).",
        param=name,
        code="too_many_images",
    )


def too_many_bytes(name: str, max_bytes: int) -> ApiError:
    """Returns the error for an image with too many bytes."""
    return invalid_image(name, f"an image has at most {max_bytes} bytes (max_image_bytes)")
