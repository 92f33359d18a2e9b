"""Images of Idefics 3 and SmolVLM: squares of the image, then the whole image as one square."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..wire.images import Grid
from .family import FamilyFiles
from .layout import ImageFormat, PromptTokens, VideoFormat

AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
# No side of an image is longer, whatever the configuration says.
LONGEST = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3Images(ImageFormat):
    """The ImageFormat of Idefics 3 and SmolVLM.

    The longer side is resized to `longest` pixels, and squares have a side of `side` pixels and
    `square_tokens` tokens each. Without `split` there is only the whole image.
    """

    placeholder: int
    tokens: PromptTokens
    longest: int
    side: int
    square_tokens: int
    split: bool
    video: VideoFormat | None = None

    @classmethod
    def from_files(cls, files: FamilyFiles) -> "Idefics3Images | None":
        placeholder = files.image_token("<image>")
        if placeholder is None:
            return None
        processor = files.image_processor
        size = processor.get("size") or {"longest_edge": 4 * 364}
        square = processor.get("max_image_size") or {"longest_edge": 364}
        return cls(
            placeholder=placeholder,
            tokens=files.tokens,
            longest=int(size["longest_edge"]),
            side=int(square["longest_edge"]),
            square_tokens=_square_tokens(files),
            split=bool(processor.get("do_image_splitting", True)),
        )

    def grid(self, width: int, height: int) -> Grid:
        """The number of squares with the whole image, and of rows and columns of the others; 1 each
        if the image is not split."""
        if not self.split:
            return 1, 1, 1
        width, height = _even(width, height, self.longest)
        width, height = _within(width, height, LONGEST)
        columns, rows = self._squares(width, height)
        return (1, 1, 1) if rows == columns == 1 else (rows * columns + 1, rows, columns)

    def token_ids(self, grid: Grid) -> Sequence[int]:
        frames, rows, columns = grid
        around, square = self.tokens[AROUND], [self.placeholder] * self.square_tokens
        ids: list[int] = []
        if frames > 1:
            line_end = self.tokens.encode("\n")
            for row in range(1, rows + 1):
                for column in range(1, columns + 1):
                    ids += [around, self.tokens[f"<row_{row}_col_{column}>"], *square]
                ids += line_end if row < rows else self.tokens.encode("\n\n")
        return [*ids, around, self.tokens[WHOLE], *square, around]

    def _squares(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows: the longer side is a whole number of squares, then the other one, in
        proportion."""
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self.side)
            return columns, math.ceil(int(columns * self.side / ratio) / self.side)
        rows = math.ceil(height / self.side)
        return math.ceil(int(rows * self.side * ratio) / self.side), rows


def _square_tokens(files: FamilyFiles) -> int:
    given = files.processor.get("image_seq_len")
    if given is not None:
        return int(given)
    vision = files.config.get("vision_config") or {}
    side = int(vision.get("image_size", 224)) // int(vision.get("patch_size", 32))
    return int(side**2 / int(files.config.get("scale_factor", 2)) ** 2)


def _even(width: int, height: int, longest: int) -> tuple[int, int]:
    """Resizes the longer side to `longest`; the other one becomes even."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    return max(width, 1), max(height, 1)


def _within(width: int, height: int, longest: int) -> tuple[int, int]:
    """Makes sides above `longest` shorter, in proportion."""
    ratio = width / height
    if width >= height and width > longest:
        width, height = longest, int(longest / ratio)
    elif height > width and height > longest:
        width, height = int(longest * ratio), longest
    return max(width, 1), max(height, 1)
