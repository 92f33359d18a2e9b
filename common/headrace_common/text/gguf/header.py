"""The header of a GGUF file: its metadata, and where its tensors are. Reads no weights.

A file is foreign data, so each length is checked before memory is taken for it. (The reader of the
package gguf checks none, and makes several numpy arrays for each token of a vocabulary.)

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import TokenizerError
from .metadata import Metadata

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 128 * 2**20
# All elements of all arrays together. The largest vocabularies of open models have 262,144 tokens,
# each with a text, a score, a type and a merge.
MAX_ELEMENTS = 2**23
MAX_TENSORS = 2**17
MAX_DIMENSIONS = 4

# The numbers of ggml's types of tensors, by their names.
TYPES: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
FLOATS = ("F16", "BF16", "F32", "F64")

# The struct codes of metadata's types.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor: its shape, the slowest dimension first, ggml's name of its type, and the place of
    its first byte in the file."""

    shape: tuple[int, ...]
    type: str
    start: int


@dataclass(frozen=True)
class Header:
    path: Path
    metadata: Metadata
    tensors: Mapping[str, StoredTensor]

    @cached_property
    def architecture(self) -> str:
        return self.metadata.text("general.architecture")


def read_header(path: Path) -> Header:
    """Reads the header. Raises TokenizerError, which names the file and what is wrong with it."""
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return _read(_Cursor(path, content))
    except (OSError, ValueError) as error:  # a file of no bytes cannot be mapped
        raise TokenizerError(f"{path}: {error}") from error


def _read(cursor: "_Cursor") -> Header:
    path = cursor.path
    if cursor.take(4) != MAGIC:
        raise TokenizerError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
    version = cursor.number("I")
    if version not in VERSIONS:
        raise TokenizerError(
            f"{path} has version {version} of GGUF; versions 2 and 3 are read, little-endian"
        )
    num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
    if num_tensors > MAX_TENSORS or num_values > MAX_ELEMENTS:
        raise TokenizerError(f"{path} names {num_tensors} tensors and {num_values} values")
    values: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.text("a key")
        values[key] = cursor.value(key, cursor.number("I"))
    metadata = Metadata(path, values)
    _refuse_parts(metadata)
    found = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.integer("general.alignment", 32)
    if alignment % 8:
        raise metadata.error("general.alignment", "a multiple of 8")
    base = -(-cursor.position // alignment) * alignment
    tensors = {
        name: StoredTensor(shape, kind, base + offset) for name, shape, kind, offset in found
    }
    if len(tensors) < num_tensors:
        raise TokenizerError(f"{path} has two tensors of one name")
    return Header(path, metadata, tensors)


def _refuse_parts(metadata: Metadata) -> None:
    parts = metadata.count("split.count", 0)
    if parts > 1:
        raise TokenizerError(
            f"{metadata.path} is one of {parts} parts of a model: join them with "
            "`llama-gguf-split --merge FIRST_PART MERGED.gguf`"
        )


def _tensor(cursor: "_Cursor") -> tuple[str, tuple[int, ...], str, int]:
    name = cursor.text("a tensor's name")
    dimensions = cursor.number("I")
    if not 0 < dimensions <= MAX_DIMENSIONS:
        raise TokenizerError(f"{cursor.path}: {name:.80} has {dimensions} dimensions")
    fastest_first = cursor.numbers("Q", dimensions)
    if not all(fastest_first):
        raise TokenizerError(f"{cursor.path}: {name:.80} has no elements")
    number = cursor.number("I")
    kind = TYPES.get(number, f"number {number}")
    return name, tuple(reversed(fastest_first)), kind, cursor.number("Q")


class _Cursor:
    """Reads a header from its beginning to its end. Raises TokenizerError beyond its bounds."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.position = path, 0
        self._content, self._end = content, min(len(content), MAX_HEADER_BYTES)
        self._elements = MAX_ELEMENTS

    def take(self, count: int) -> bytes:
        return self._content[self._advance(count) : self.position]

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        start = self._advance(count * struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{count}{code}", self._content, start)

    def text(self, what: str) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{self.path}: {what} is not UTF-8: {error}") from error

    def value(self, key: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _TEXT:
            return self.text(key)
        if kind == _ARRAY:
            return self._array(key, self.number("I"), self.number("Q"))
        raise TokenizerError(f"{self.path}: {key:.80} has a value of the unknown type {kind}")

    def _array(self, key: str, kind: int, count: int) -> list[Any]:
        self._elements -= count
        if self._elements < 0:
            raise TokenizerError(f"{self.path}: {key:.80} makes more than {MAX_ELEMENTS} values")
        if kind in _NUMBERS:
            return list(self.numbers(_NUMBERS[kind], count))
        if kind == _TEXT:
            return [self.text(key) for _ in range(count)]
        raise TokenizerError(f"{self.path}: {key:.80} is an array of the unknown type {kind}")

    def _advance(self, count: int) -> int:
        start = self.position
        if count > self._end - start:
            raise TokenizerError(
                f"{self.path} is cut short, or its header has more than {MAX_HEADER_BYTES} bytes"
            )
        self.position += count
        return start
