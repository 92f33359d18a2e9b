"""The tokens that stand for images and videos in a prompt, as a family of models counts them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import HeadraceError
from ..text.errors import TokenizerError
from ..wire.images import Grid, ImageSpan

# How many frames of a video are a second, from one in days to more than those of any camera.
MIN_FPS, MAX_FPS = 1e-6, 1000.0


class ImageError(HeadraceError):
    """An image that cannot be read, or that the model cannot take; the message says why."""

    code = "image_invalid"


class PlaceholderMismatch(HeadraceError):
    """The prompt has another number of placeholders than images."""

    code = "image_placeholders"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """What replaces the placeholder of one image: its tokens, and its grid of patches.

    The grid is as in ImageSpan.
    """

    token_ids: Sequence[int]
    grid: Grid

    def ended(self, placeholder: int) -> "ImageLayout":
        """The same with one more token."""
        return replace(self, token_ids=(*self.token_ids, placeholder))


class VideoFormat(ABC):
    """How a model reads videos, whose frames have equal sizes.

    The chat template writes `written` once for each video. The tower reads `group` frames together;
    the last one is repeated where a group has fewer. The token `placeholder` stands for a group in
    a prompt, and is the one that embeddings replace. With `ended` the last group has one more of
    it. `processor_options` are arguments of transformers' image processor for frames. Without
    `shown` the template does not write videos, and gets `written` as a text.
    """

    placeholder: int
    written: str
    group: int

    @property
    def ended(self) -> bool:
        return False

    @property
    def shown(self) -> bool:
        return True

    @property
    def processor_options(self) -> Mapping[str, Any]:
        return {}

    @abstractmethod
    def text(self, frames: int, fps: float) -> str:
        """The text of a video with this number of frames, of which `fps` are a second. It has
        the placeholder once for each group."""

    def times(self, groups: int, fps: float) -> Sequence[int] | None:
        """With M-RoPE, the positions from a video's first group to each; None: groups have theirs
        after each other, as images."""
        return None

    @abstractmethod
    def resized(self, frames: int, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels that the frames of a video are resized to. Raises
        ImageError."""

    @abstractmethod
    def grid(self, width: int, height: int) -> Grid:
        """The grid of a group whose frames were resized to this size, see ImageSpan."""

    @abstractmethod
    def token_ids(self, grid: Grid) -> Sequence[int]:
        """The tokens of a group with this grid. Raises TokenizerError for a token that the
        tokenizer does not have."""

    def layout(self, width: int, height: int) -> ImageLayout:
        """The layout of a group whose frames were resized to this size."""
        grid = self.grid(width, height)
        return ImageLayout(token_ids=self.token_ids(grid), grid=grid)

    def write(self, text: str, videos: Sequence[tuple[int, float]]) -> str:
        """The text of a prompt with videos, given as for `text`, in order.

        Raises PlaceholderMismatch.
        """
        between = text.split(self.written)
        if len(between) != len(videos) + 1:
            raise PlaceholderMismatch(
                f"the prompt has {len(between) - 1} places for {len(videos)} videos"
            )
        texts = [*(self.text(*video) for video in videos), ""]
        return "".join(part for pair in zip(between, texts, strict=True) for part in pair)

    def show(self, messages: Any) -> Any:
        """Messages for the chat template, in which texts of users cannot have special tokens."""
        if self.shown:
            return messages
        written = {"type": "text", "text": self.written}
        return [
            {**message, "content": [written if _is_video(part) else part for part in content]}
            if isinstance(content := message.get("content"), list)
            else message
            for message in messages
        ]

    def groups(self, frames: int) -> range:
        """The first frame of each group."""
        return range(0, frames, self.group)


class ImageFormat(ABC):
    """How a model reads images.

    The chat template writes the token `placeholder` once for each image. With M-RoPE `merge` x
    `merge` patches share a position; None: each token has one, as text. With `bidirectional` the
    tokens that embeddings replace see those after them in the same image. `processor_options` are
    arguments of transformers' image processor beside the image. `rewritten` is a text of the chat
    template and what replaces it before the prompt is tokenised; None: nothing does. With `alone`
    an image is a prompt without text and template, which the model embeds as one vector. `video`
    says how it reads videos; None: it reads none.
    """

    placeholder: int

    @property
    def merge(self) -> int | None:
        return None

    @property
    def bidirectional(self) -> bool:
        return False

    @property
    def alone(self) -> bool:
        return False

    @property
    def video(self) -> VideoFormat | None:
        return None

    @property
    def placeholders(self) -> frozenset[int]:
        """The tokens that stand for an image, or a group of a video's frames."""
        return frozenset(each.placeholder for each in (self, self.video) if each is not None)

    @property
    def processor_options(self) -> Mapping[str, Any]:
        return {}

    @property
    def rewritten(self) -> tuple[str, str] | None:
        return None

    @abstractmethod
    def grid(self, width: int, height: int) -> Grid:
        """The grid of an image of this size in pixels, see ImageSpan. Raises ImageError."""

    @abstractmethod
    def token_ids(self, grid: Grid) -> Sequence[int]:
        """The tokens of an image with this grid. Raises TokenizerError for a token that the
        tokenizer does not have."""

    def layout(self, width: int, height: int) -> ImageLayout:
        """The layout of an image of this size in pixels. Raises ImageError."""
        grid = self.grid(width, height)
        return ImageLayout(token_ids=self.token_ids(grid), grid=grid)

    def rewrite(self, text: str) -> str:
        """The text of a prompt as it is tokenised."""
        return text if self.rewritten is None else text.replace(*self.rewritten)


class PromptTokens:
    """The tokens of a tokenizer that stand around and between parts of images. They are looked up
    when they are needed: engines read images without a tokenizer. `find` returns the id of a
    special token, None if there is none, `encode` the ids of a text."""

    def __init__(
        self, find: Callable[[str], int | None], encode: Callable[[str], Sequence[int]]
    ) -> None:
        self.find, self.encode = find, encode

    def __getitem__(self, token: str) -> int:
        found = self.find(token)
        if found is None:
            raise TokenizerError(f"the tokenizer has no token {token}, which images need")
        return found


NO_TOKENS = PromptTokens(lambda _: None, lambda _: ())


def expand(
    placeholders: Collection[int],
    prompt: Sequence[int],
    images: Sequence[tuple[bytes, ImageLayout]],
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Replaces each placeholder by the tokens of its image, given by digest and layout, in order.

    Returns the prompt and where the images are in it. Raises PlaceholderMismatch.
    """
    found = sum(token_id in placeholders for token_id in prompt)
    if found != len(images):
        raise PlaceholderMismatch(f"the prompt has {found} places for {len(images)} images")
    remaining = iter(images)
    ids: list[int] = []
    spans = []
    for token_id in prompt:
        if token_id not in placeholders:
            ids.append(token_id)
            continue
        digest, layout = next(remaining)
        length = len(layout.token_ids)
        spans.append(ImageSpan(digest=digest, start=len(ids), length=length, grid=layout.grid))
        ids += layout.token_ids
    return ids, tuple(spans)


def _is_video(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "video"


def clock(seconds: float) -> str:
    """A time in minutes and seconds, as in prompts with videos."""
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
