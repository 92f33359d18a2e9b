"""Processes whose machine's clock is wrong, by Debian's package libfaketime."""

from collections.abc import Mapping
from pathlib import Path

from .prometheus import require_program

_LIBRARIES = Path("/usr/lib")


def faked_clock(seconds: int) -> Mapping[str, str]:
    """Variables of a process whose Unix time is `seconds` ahead; its monotonic clock is right.

    Skips the test where the library is missing, or fails it in CI.
    """
    require_program("faketime")
    (library,) = _LIBRARIES.glob("*/faketime/libfaketimeMT.so.1")
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME": f"{seconds:+d}",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
