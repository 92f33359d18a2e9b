"""Images and videos in prompts of the offline API, put in the places of their placeholders."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, Union

from headrace_common.images.frames import FrameGroup, group_frames
from headrace_common.images.layout import (
    NO_TOKENS,
    ImageError,
    ImageFormat,
    ImageLayout,
    PlaceholderMismatch,
    PromptTokens,
    expand,
)
from headrace_common.wire.images import image_digest

from ..checkpoints.checkpoint import Checkpoint
from ..core.errors import RequestError
from ..core.images import PromptImage
from ..models.vision.image_reader import ImageReader, read_format
from .media import Media, Video
from .tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

# What a model reads together, and its layout.
Placed: TypeAlias = tuple[Union["Image", "FrameGroup[Image]"], ImageLayout]


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
        self, text: str | None, token_ids: list[int], images: Sequence[Media], salt: bytes
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Replaces each placeholder of a prompt, which may have a text, by the tokens of its image
        or group of frames.

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
            placed = _in_order(self._format, token_ids, list(_placed(self._format, images)))
            found = [(image_digest(_content(each), salt), layout) for each, layout in placed]
            ids, spans = expand(self._format.placeholders, token_ids, found)
        except (ImageError, PlaceholderMismatch) as error:
            raise RequestError(f"images: {error}") from error
        return ids, self._reader.read(spans, [each for each, _ in placed])


def _placed(form: ImageFormat, media: Sequence[Media]) -> Iterator[Placed]:
    for each in media:
        if not isinstance(each, Video):
            yield each, form.layout(*each.size)
        elif form.video is None:
            raise RequestError("this LLM reads no videos: send text and images only")
        else:
            yield from group_frames(form.video, each.frames, each.fps, *each.frames[0].size)


def _in_order(form: ImageFormat, token_ids: Sequence[int], placed: list[Placed]) -> list[Placed]:
    """In the order of their placeholders, if those of images and videos differ."""
    if form.video is None or form.video.placeholder == form.placeholder:
        return placed
    groups = [each for each in placed if isinstance(each[0], FrameGroup)]
    images = [each for each in placed if not isinstance(each[0], FrameGroup)]
    kinds = [
        token_id == form.placeholder for token_id in token_ids if token_id in form.placeholders
    ]
    if kinds.count(True) != len(images) or kinds.count(False) != len(groups):
        raise PlaceholderMismatch(
            f"the prompt has {kinds.count(True)} places for {len(images)} images, and "
            f"{kinds.count(False)} for {len(groups)} groups of frames"
        )
    return [(images if kind else groups).pop(0) for kind in kinds]


def _content(image: "Image | FrameGroup[Image]") -> bytes:
    """What tells the image, or the group of frames, from others."""
    if isinstance(image, FrameGroup):
        return repr(image.numbers).encode() + b"".join(map(_content, image.frames))
    return repr(image.size).encode() + image.tobytes()
