"""Values that no field expects: of the wrong type, too many, too long, too deep, or not JSON."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from .dice import Dice

# Bodies may have 8 MiB.
LARGEST = 8_000_000
SIZES = (1_000, 60_000, 1_000_000, 2_000_000, LARGEST)
Maker = Callable[[bytes, int], bytes]


def _listed(element: bytes) -> Maker:
    return lambda _, size: b"[" + b",".join([element] * max(1, size // (len(element) + 1))) + b"]"


def _samples(sample: bytes, size: int) -> bytes:
    return _listed(sample)(sample, size)


def _text(letters: bytes) -> Maker:
    return lambda _, size: b'"' + letters * max(1, size // len(letters)) + b'"'


def _nested(opening: bytes, closing: bytes, most: int = LARGEST) -> Maker:
    def make(_: bytes, size: int) -> bytes:
        depth = min(most, size // (len(opening) + len(closing)))
        return opening * depth + b"1" + closing * depth

    return make


def _keys(sample: bytes, size: int, value: bytes | None = None) -> bytes:
    each = sample if value is None else value
    count = max(1, size // (len(each) + 14))
    return b"{" + b",".join(b'"%d":%b' % (5 * i, each) for i in range(count)) + b"}"


def _same_key(_: bytes, size: int) -> bytes:
    return b"{" + b",".join([b'"a":1'] * max(1, size // 6)) + b"}"


def _just(text: str) -> Maker:
    return lambda _sample, _size: text.encode()


# Each takes the JSON of a value that the field allows, and the approximate number of bytes to make.
MAKERS: Mapping[str, Maker] = {
    "numbers": _listed(b"1"),
    "nulls": _listed(b"null"),
    "empty objects": _listed(b"{}"),
    "empty lists": _listed(b"[]"),
    "lists of one": _listed(b"[1]"),
    "texts": _listed(b'"a"'),
    "objects of one": _listed(b'{"a":1}'),
    "many that are allowed": _samples,
    "many keys": lambda sample, size: _keys(sample, size, b"1"),
    "many keys that are allowed": _keys,
    "one key many times": _same_key,
    "a long word": _text(b"a"),
    "many words": _text(b"a b "),
    "spaces": _text(b" "),
    "line breaks": _text(b"\\n"),
    "digits in a text": _text(b"7"),
    "punctuation": _text(b"'.,!"),
    "emoji": _text("\U0001f600".encode()),
    "escaped emoji": _text(b"\\ud83d\\ude00"),
    "combining marks": _text("e\u0301\u0327".encode()),
    "Chinese": _text("你好".encode()),
    "nulls in a text": _text(b"\\u0000"),
    "lone surrogates": _text(b"\\ud800"),
    "special tokens": _text(b"<|im_end|>"),
    "markers of tools": _text(b"<tool_call>{}</tool_call>"),
    "no UTF-8": _text(b"\xff\xfe"),
    "deep lists": _nested(b"[", b"]"),
    "deep objects": _nested(b'{"a":', b"}"),
    "lists as deep as allowed": _nested(b"[", b"]", 900),
    "a number of many digits": lambda _, size: b"1" * size,
    "a fraction of many digits": lambda _, size: b"0." + b"1" * size,
    "4,300 digits": _just("9" * 4300),
    "1e400": _just("1e400"),
    "1e-400000": _just("1e-400000"),
    "2^63": _just(str(2**63)),
    "-2^63-1": _just(str(-(2**63) - 1)),
    "10^18": _just(str(10**18)),
    "a billion": _just(str(10**9)),
    "NaN": _just("NaN"),
    "-Infinity": _just("-Infinity"),
    "true": _just("true"),
    "null": _just("null"),
    "an empty list": _just("[]"),
    "an empty object": _just("{}"),
    "an empty text": _just('""'),
    "a fraction": _just("0.5"),
    "nothing": _just(""),
    "not closed": lambda _, size: b'["' + b"a" * size,
}
# Values without a length are drawn less often: a second one tests nothing new.
_LARGE = [name for name in MAKERS if MAKERS[name](b"1", 1) != MAKERS[name](b"1", 1000)]


def draw_value(dice: Dice, sample: Any) -> tuple[str, bytes]:
    """Returns the description of a value, and its JSON."""
    large = dice.rng("large").random() < 0.75
    name = dice.pick("value", _LARGE if large else list(MAKERS))
    size = dice.pick("size", SIZES)
    made = MAKERS[name](json.dumps(sample).encode(), size)
    return f"{name}, {len(made):,} bytes" if name in _LARGE else name, made
