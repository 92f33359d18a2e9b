"""The null CUDA device as seen by a program that runs on it: what was called, and which rules were
broken.

Only for processes that `null_cuda` started.
"""

import ctypes
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_OnSync = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_uint64)
# The number of a stack's frames that are reported.
FRAMES = 6


@dataclass(slots=True)
class Watched:
    """`counts` are the calls of each function and the launches of each kernel; `waits` the calls
    that waited for the device, each with the innermost frames that led to it."""

    counts: dict[str, int] = field(default_factory=dict)
    waits: list[str] = field(default_factory=list)


class NullDevice:
    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        for name in ("null_cuda_counts", "null_cuda_complaints"):
            getattr(self._library, name).restype = ctypes.c_void_p
        self._library.null_cuda_set_answer.argtypes = [ctypes.c_uint64]
        self._free = ctypes.CDLL(None).free
        self._free.argtypes = [ctypes.c_void_p]

    def counts(self) -> dict[str, int]:
        """Counters by name: calls, launches, and live bytes, streams, events and graphs."""
        lines = (line.rsplit("\t", 1) for line in self._text("null_cuda_counts").splitlines())
        return {name: int(number) for name, number in lines}

    def complaints(self) -> list[str]:
        """Rules that were broken since the process began."""
        return self._text("null_cuda_complaints").splitlines()

    def answer(self, word: int) -> None:
        """Sets the eight bytes that all reads from the device repeat."""
        self._library.null_cuda_set_answer(word)

    @contextmanager
    def watch(self) -> Iterator[Watched]:
        """Yields the changes of the counters and the waiting calls within the block."""
        watched, before = Watched(), self.counts()
        callback = _OnSync(_noting(watched.waits))
        self._library.null_cuda_on_sync(callback)
        try:
            yield watched
        finally:
            self._library.null_cuda_on_sync(_OnSync(0))
            after = self.counts()
            changes = {name: number - before.get(name, 0) for name, number in after.items()}
            watched.counts.update({name: change for name, change in changes.items() if change})

    def _text(self, name: str) -> str:
        address = getattr(self._library, name)()
        text = ctypes.string_at(address).decode()
        self._free(address)
        return text


def _noting(waits: list[str]) -> Callable[[bytes, int], None]:
    def note(name: bytes, size: int) -> None:
        frames = traceback.extract_stack()[-FRAMES - 1 : -1]
        places = " < ".join(f"{one.filename}:{one.lineno}" for one in reversed(frames))
        waits.append(f"{name.decode()} of {size} bytes in {places}")

    return note
