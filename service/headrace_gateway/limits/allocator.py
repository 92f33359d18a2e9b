"""Makes glibc return the memory of large requests to the system when they have ended."""

import ctypes
import sys

# Constants of malloc.h. Setting one threshold keeps glibc from raising both after the first large
# request.
_TRIM_THRESHOLD, _ARENA_MAX = -1, -8
TRIM_BYTES = 2**20
ARENAS = 2


def give_back_memory() -> None:
    """Configures glibc's allocator; call it before threads start. Does nothing on other systems."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, TRIM_BYTES)
        mallopt(_ARENA_MAX, ARENAS)
