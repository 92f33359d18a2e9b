"""Decides which images a step encodes, and which encoded ones are dropped for them.

Images are counted by their tokens, as prompts are. The runner keeps the embeddings and does what is
decided here.
"""

from collections.abc import Sequence

from ..core.images import PromptImage


class EncoderCache:
    """The images that are encoded, the least recently used first.

    `capacity` is the number of tokens for which there is room. A step encodes images of at most
    `budget` tokens together, or a single one. What no run of the step reads may be dropped, even if
    a prompt that is not finished needs it later: it is encoded again then. `queries` counts images
    that runs have begun, `hits` those of them that were encoded already, `encoded` the images that
    were encoded, `tokens` their tokens and `seconds` the time that it took.
    """

    __slots__ = (
        "_budget",
        "_capacity",
        "_dropped",
        "_left",
        "_needed",
        "_new",
        "_sizes",
        "_used",
        "encoded",
        "hits",
        "queries",
        "seconds",
        "tokens",
    )

    def __init__(self, capacity: int, budget: int) -> None:
        self._capacity, self._budget = capacity, budget
        self._sizes: dict[bytes, int] = {}  # of the images, by digest
        self._used = 0
        self._left = budget
        self._needed: set[bytes] = set()
        self._new: list[PromptImage] = []
        self._dropped: list[bytes] = []
        self.queries = self.hits = self.encoded = self.tokens = 0
        self.seconds = 0.0

    def reach(self, images: Sequence[PromptImage], start: int, end: int) -> int:
        """The end, up to `end`, of a run from `start` of which every image is or will be encoded.

        It is `start` if the run has to wait for a later step.
        """
        for image in images:
            span = image.span
            if span.end <= start:
                continue
            if span.start >= end:
                break
            if not self._take(image, begins=span.start >= start):
                return max(start, span.start)
        return end

    def finish_step(self) -> tuple[tuple[PromptImage, ...], tuple[bytes, ...]]:
        """The images to encode in the step, and the digests of those to drop before that."""
        made = tuple(self._new), tuple(self._dropped)
        self._new, self._dropped, self._left = [], [], self._budget
        self._needed.clear()
        return made

    def _take(self, image: PromptImage, *, begins: bool) -> bool:
        """Whether a run of the step can read the image. `begins`: it reads the first token."""
        digest, size = image.span.digest, image.span.length
        known = digest in self._sizes
        if not known and not self._has_room(size):
            return False
        self.queries += begins
        self.hits += begins and known
        if known:
            self._sizes[digest] = self._sizes.pop(digest)
        else:
            self._encode(image)
        self._needed.add(digest)
        return True

    def _has_room(self, size: int) -> bool:
        if self._new and size > self._left:
            return False
        kept = sum(self._sizes[digest] for digest in self._needed)
        return kept + size <= self._capacity

    def _encode(self, image: PromptImage) -> None:
        size = image.span.length
        for digest in [each for each in self._sizes if each not in self._needed]:
            if self._used + size <= self._capacity:
                break
            self._used -= self._sizes.pop(digest)
            self._dropped.append(digest)
        self._sizes[image.span.digest] = size
        self._used += size
        self._left -= size
        self._new.append(image)
        self.encoded += 1
        self.tokens += size


def whole_images(images: Sequence[PromptImage], start: int, end: int, *, grow: bool = True) -> int:
    """The end of a run from `start` that does not end inside an image: it ends before that image,
    or if it cannot begin otherwise, with `grow` after it."""
    for image in images:
        span = image.span
        if span.start < end < span.end:
            if span.start > start:
                return span.start
            return span.end if grow else start
    return end
