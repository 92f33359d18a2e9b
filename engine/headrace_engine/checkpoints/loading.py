"""Progress of a long load, and reading ahead, which makes it shorter.

The reader of weights says which bytes it will need, in order, and which it has read; nothing here
reads files.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

logger = logging.getLogger(__name__)

# The operating system is asked to read up to this many bytes ahead.
READ_AHEAD = 1 << 30
SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True, slots=True)
class Portion:
    """Parts [start, stop) of a tensor's `count` equal parts."""

    start: int
    stop: int
    count: int

    def joined(self, other: "Portion") -> "Portion":
        """The portion from the first part of both to the last one."""
        first, last = min(self.start, other.start), max(self.stop, other.stop)
        return Portion(first, last, self.count)


WHOLE = Portion(0, 1, 1)


@dataclass(frozen=True, slots=True)
class FileRange:
    file: Path
    start: int
    stop: int

    def of(self, portion: Portion) -> "FileRange":
        """The bytes of a portion of the tensor that this is."""
        length = (self.stop - self.start) // portion.count
        first = self.start + portion.start * length
        return FileRange(self.file, first, first + (portion.stop - portion.start) * length)


class ReadAhead:
    """Asks the operating system for the files' pages before they are needed, many at once: the disk
    (or network) works on a long queue while the CPU packs what has arrived.

    It is only a hint: it does nothing without posix_fadvise, or if the files are cached.
    """

    def __init__(self, ranges: Iterable[FileRange], ahead: int = READ_AHEAD) -> None:
        self._ranges, self._ahead = iter(ranges), ahead
        self._asked = self._used = 0
        self._advise()

    def advance(self, count: int) -> None:
        self._used += count
        self._advise()

    def _advise(self) -> None:
        while self._asked < self._used + self._ahead:
            wanted = next(self._ranges, None)
            if wanted is None:
                return
            self._asked += wanted.stop - wanted.start
            _ask(wanted)


def _ask(wanted: FileRange) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    with wanted.file.open("rb") as file:
        length = wanted.stop - wanted.start
        os.posix_fadvise(file.fileno(), wanted.start, length, os.POSIX_FADV_WILLNEED)


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file that safetensors has checked: what it says of each tensor,
    and where the data begins."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def data_ranges(file: Path) -> dict[str, FileRange]:
    """The byte range of each tensor in a safetensors file whose header has been checked."""
    header, base = read_header(file)
    return {
        name: FileRange(file, base + entry["data_offsets"][0], base + entry["data_offsets"][1])
        for name, entry in header.items()
    }


class LoadProgress:
    """Shows a bar on a terminal, or else a log line every few seconds; for use in a `with`
    statement."""

    def __init__(
        self,
        interactive: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interactive = sys.stderr.isatty() if interactive is None else interactive
        self._clock = clock
        self.total = self.done = 0
        self._started = self._told = clock()
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if error is None and self.total:
            seconds = round(self._clock() - self._started, 2)
            logger.info("weights loaded", extra={"bytes": self.total, "seconds": seconds})

    def begin(self, total: int) -> None:
        """Starts a load of `total` bytes."""
        self.total = total
        if self._interactive:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True)

    def advance(self, count: int) -> None:
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._clock() - self._told >= SECONDS_BETWEEN_LINES:
            self._told = self._clock()
            share = round(self.done / max(1, self.total), 3)
            logger.info("loading weights", extra={"share": share, "bytes": self.done})
