"""Cuts long texts into pieces that can be tokenised one by one, so that memory stays bounded.

The tokenizers library needs about 200 bytes for each character of one call. A text is cut after a
word, where tokenising both sides shows that no token crosses the cut.
"""

import re
from collections.abc import Callable, Iterator

PIECE_CHARS = 65_536
# The maximal number of characters in one call if no cut is found.
MOST_CHARS = 8 * PIECE_CHARS
# Characters on either side of a cut that are inspected.
_WINDOW = 512
_TRIES = 32
# A boundary between a word and a text that does not belong to it, unlike the second half of
# "isn't".
_END_OF_WORD = re.compile("(?<=\\w)(?=[^\\w'\N{RIGHT SINGLE QUOTATION MARK}])")

Encode = Callable[[str], list[int]]


class NoCut(ValueError):
    """A text is too long to be tokenised in one call and cannot be cut."""


def pieces(text: str, encode: Encode) -> Iterator[str]:
    """The pieces of a text in order; `encode` must add no special tokens. Raises NoCut."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = _find_cut(text, start, encode)
        yield text[start:end]
        start = end
    yield text[start:]


def _find_cut(text: str, start: int, encode: Encode) -> int:
    most = min(len(text), start + MOST_CHARS)
    candidates = _END_OF_WORD.finditer(text, start + PIECE_CHARS // 2, most)
    for _, candidate in zip(range(_TRIES), candidates, strict=False):
        if _is_cut(text, candidate.start(), encode):
            return candidate.start()
    if most == len(text):
        return most
    raise NoCut(
        f"{MOST_CHARS} characters of the text have no end of a word where it could be cut to be "
        "tokenised: put blanks or new lines into it"
    )


def _is_cut(text: str, end: int, encode: Encode) -> bool:
    left, right = text[max(0, end - _WINDOW) : end], text[end : end + _WINDOW]
    return encode(left + right) == encode(left) + encode(right)
