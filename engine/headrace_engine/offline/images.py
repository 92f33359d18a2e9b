"""Images in prompts of the offline API: read, and put in the places of their placeholders."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace_common.images.layout import (
    NO_TOKENS,
    ImageError,
    PlaceholderMismatch,
    PromptTokens,
    expand,
)
from headrace_common.wire.images import image_digest

from ..checkpoints.checkpoint import Checkpoint
from ..core.errors import RequestError
from ..core.images import PromptImage
from ..models.vision.image_reader import MAX_PIXELS, ImageReader, read_format
from .arguments import NO_MEDIA
from .tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

_TEXTS = frozenset({"text", "input_text", "output_text"})
_URLS = frozenset({"image_url", "input_image"})


class ImagePrompts:
    """Puts images into the prompts of one model, whose `tokenizer` then knows how it reads them.
    `reader` is None if the model reads none."""

    def __init__(
        self, checkpoint: Checkpoint, tokenizer: ChatTokenizer | None, reader: ImageReader | None
    ) -> None:
        self._reader = reader
        tokens = NO_TOKENS
        if tokenizer is not None:
            encode = partial(tokenizer.encode, add_special_tokens=False)
            tokens = PromptTokens(tokenizer.token_to_id, encode)
        self._format = None if reader is None else read_format(checkpoint, tokens)
        if tokenizer is not None:
            tokenizer.images = self._format

    def expand(
        self, text: str | None, token_ids: list[int], images: Sequence["Image"], salt: bytes
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Replaces each placeholder of a prompt, which may have a text, by the tokens of its image.

        Raises RequestError.
        """
        if not images:
            return token_ids, ()
        if self._reader is None or self._format is None:
            raise RequestError("this LLM reads no images: send text only")
        if self._format.alone:
            if text != "":
                raise RequestError("this model embeds an image or a text: send prompt '' with it")
            token_ids = [self._format.placeholder]
        try:
            layouts = [self._format.layout(*image.size) for image in images]
            digests = [image_digest(_content(image), salt) for image in images]
            ids, spans = expand(
                self._format.placeholders, token_ids, list(zip(digests, layouts, strict=True))
            )
        except (ImageError, PlaceholderMismatch) as error:
            raise RequestError(f"images: {error}") from error
        return ids, self._reader.read(spans, images)


def read_images(data: Any) -> tuple["Image", ...]:
    """The images of a prompt's multi_modal_data. Raises RequestError for anything else."""
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        raise RequestError(f"multi_modal_data: {NO_MEDIA}")
    found = data.get("image")
    listed = found if isinstance(found, list | tuple) else [] if found is None else [found]
    return tuple(map(_image, listed))


def read_parts(
    conversation: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], tuple["Image", ...]]:
    """A conversation for a chat template, and its images in order.

    Parts of text are joined with line breaks, as in vLLM. Contents with images remain lists, of
    which templates read {"type": "image"}. Raises RequestError for other parts.
    """
    messages: list[Mapping[str, Any]] = []
    images: list[Image] = []
    for message in conversation:
        content = message.get("content")
        if not isinstance(content, list):
            messages.append(message)
            continue
        parts = [_part(part, images) for part in content]
        texts = [part["text"] for part in parts if "text" in part]
        whole = "\n".join(texts) if len(texts) == len(parts) else parts
        messages.append({**message, "content": whole})
    return messages, tuple(images)


def _part(part: Any, images: list["Image"]) -> Mapping[str, str]:
    """A part as templates read it; its image is added to `images`."""
    if not isinstance(part, Mapping):
        return {"type": "text", "text": str(part)}
    kind = part.get("type")
    if kind in _TEXTS:
        return {"type": "text", "text": str(part["text"])}
    if kind in _URLS:
        images.append(_from_url(part.get("image_url")))
    elif kind == "image_pil":
        images.append(_image(part.get("image_pil")))
    else:
        raise RequestError(
            f"messages: a part of type {kind!r:.60} is not supported: send text or image_url"
        )
    return {"type": "image"}


def _from_url(given: Any) -> "Image":
    from headrace_common.images.decoding import open_image

    url = given.get("url") if isinstance(given, Mapping) else given
    head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not (comma and head.startswith("data:image/") and head.endswith(";base64")):
        raise RequestError(
            "image_url must be data:image/png;base64,... or that of another type of image, not "
            f"{url!r:.60}: nothing is fetched"
        )
    try:
        return open_image(base64.b64decode(data, validate=True), MAX_PIXELS)
    except (binascii.Error, ImageError) as error:
        raise RequestError(f"image_url cannot be read: {error}") from error


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


def _content(image: "Image") -> bytes:
    """What tells the image from others."""
    return repr(image.size).encode() + image.tobytes()
