"""Images and videos that prompts of the offline API name: as PIL images, arrays or data: URLs."""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union

from headrace_common.images.layout import MAX_FPS, MIN_FPS, ImageError, PlaceholderMismatch

from ..core.errors import RequestError
from ..models.vision.image_reader import MAX_PIXELS
from .arguments import NO_MEDIA

if TYPE_CHECKING:
    from PIL.Image import Image

_TEXTS = frozenset({"text", "input_text", "output_text"})
_URLS = frozenset({"image_url", "input_image"})
_FRAMES = "data:video/jpeg;base64"
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Video:
    """Frames in RGB of one size, of which `fps` are a second."""

    frames: Sequence["Image"]
    fps: float

    @property
    def counted(self) -> tuple[int, float]:
        """The number of frames, and `fps`."""
        return len(self.frames), self.fps


Media: TypeAlias = Union["Image", Video]


def read_media(data: Any) -> tuple[Media, ...]:
    """The images of a prompt's multi_modal_data, then its videos. Raises RequestError for anything
    else."""
    if not isinstance(data, Mapping) or set(data) - {"image", "video"}:
        raise RequestError(f"multi_modal_data: {NO_MEDIA}")
    found = data.get("image")
    images = found if isinstance(found, list | tuple) else [] if found is None else [found]
    return (*map(_image, images), *map(_video, _videos(data.get("video"))))


def read_fps(media_io_kwargs: Any) -> float:
    """How many frames of a video are a second, by vLLM's option. Raises RequestError."""
    if media_io_kwargs is None:
        return 1.0
    video = media_io_kwargs.get("video") if isinstance(media_io_kwargs, Mapping) else None
    if not isinstance(video, Mapping) or len(media_io_kwargs) > 1:
        raise RequestError('media_io_kwargs must be {"video": {"fps": number}}')
    return _fps(video)


def read_parts(
    conversation: Sequence[Mapping[str, Any]], fps: float
) -> tuple[list[Mapping[str, Any]], tuple[Media, ...]]:
    """A conversation for a chat template, and its images and videos in order.

    Parts of text are joined with line breaks, as in vLLM. Contents with images remain lists, of
    which templates read {"type": "image"} and {"type": "video"}. Raises RequestError for other
    parts.
    """
    messages: list[Mapping[str, Any]] = []
    media: list[Media] = []
    for message in conversation:
        content = message.get("content")
        if not isinstance(content, list):
            messages.append(message)
            continue
        parts = [_part(part, media, fps) for part in content]
        texts = [part["text"] for part in parts if "text" in part]
        whole = "\n".join(texts) if len(texts) == len(parts) else parts
        messages.append({**message, "content": whole})
    return messages, tuple(media)


def written(encode: Callable[[], Made]) -> Made:
    """What `encode` makes of a text with videos. Raises RequestError if they do not fit it."""
    try:
        return encode()
    except PlaceholderMismatch as error:
        raise RequestError(f"videos: {error}") from error


def _part(part: Any, media: list[Media], fps: float) -> Mapping[str, str]:
    """A part as templates read it; its image or video is added to `media`."""
    if not isinstance(part, Mapping):
        return {"type": "text", "text": str(part)}
    kind = part.get("type")
    if kind in _TEXTS:
        return {"type": "text", "text": str(part["text"])}
    if kind == "video_url":
        media.append(_video((_frames(_url(part.get("video_url"))), {"fps": fps})))
        return {"type": "video"}
    if kind in _URLS:
        media.append(_from_url(_url(part.get("image_url"))))
    elif kind == "image_pil":
        media.append(_image(part.get("image_pil")))
    else:
        raise RequestError(
            f"messages: a part of type {kind!r:.60} is not supported: send text, image_url or "
            "video_url"
        )
    return {"type": "image"}


def _url(given: Any) -> str:
    url = given.get("url") if isinstance(given, Mapping) else given
    return url if isinstance(url, str) else repr(url)


def _from_url(url: str) -> "Image":
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:image/") and head.endswith(";base64")):
        raise RequestError(
            "image_url must be data:image/png;base64,... or that of another type of image, not "
            f"{url!r:.60}: nothing is fetched"
        )
    return _decoded(data, "image_url")


def _frames(url: str) -> list["Image"]:
    head, *frames = url.split(",")
    if head != _FRAMES or not frames:
        raise RequestError(
            f"video_url must be {_FRAMES}, and then frames as JPEG in base64 with commas between "
            f"them, not {url!r:.60}"
        )
    return [_decoded(frame, "video_url") for frame in frames]


def _decoded(data: str, name: str) -> "Image":
    from headrace_common.images.decoding import open_image

    try:
        return open_image(base64.b64decode(data, validate=True), MAX_PIXELS)
    except (binascii.Error, ImageError) as error:
        raise RequestError(f"{name} cannot be read: {error}") from error


def _videos(given: Any) -> Sequence[Any]:
    """Each video of what may be one, or a list of several."""
    if given is None:
        return []
    several = isinstance(given, list) and all(map(_is_video, given))
    return given if several else [given]


def _is_video(value: Any) -> bool:
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 4


def _video(given: Any) -> Video:
    fps = 1.0
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        given, options = given
        fps = _fps(options)
    if not _is_video(given) or not len(given):
        raise RequestError(
            "a video must be a list of images or an array [frames, height, width, 3] of bytes, not "
            f"{type(given).__name__}"
        )
    frames = [_image(frame) for frame in given]
    if len({frame.size for frame in frames}) > 1:
        raise RequestError("all frames of a video have one size")
    return Video(frames, fps)


def _fps(options: Mapping[str, Any]) -> float:
    fps = options.get("fps", 1.0)
    if set(options) - {"fps"} or not isinstance(fps, int | float) or not MIN_FPS <= fps <= MAX_FPS:
        raise RequestError(
            "a video has only the option fps, how many of its frames are a second, from "
            f"{MIN_FPS:g} to {MAX_FPS:g}: not {options!r:.80}"
        )
    return float(fps)


def _image(value: Any) -> "Image":
    from PIL import Image

    if isinstance(value, Image.Image):
        return value.convert("RGB")
    try:
        return Image.fromarray(value).convert("RGB")
    except (AttributeError, TypeError, ValueError) as error:
        raise RequestError(
            f"an image must be one of PIL or an array [height, width, 3] of bytes, not "
            f"{type(value).__name__}"
        ) from error
