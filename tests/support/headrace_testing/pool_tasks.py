"""Tasks of limited pools that behave badly, and how tests find their processes."""

import ctypes
import os
import signal
import time
from pathlib import Path

MIB = 2**20


def pid() -> int:
    return os.getpid()


def spin(marker: str) -> None:
    """Keeps its processor busy without end."""
    Path(marker).write_text(str(os.getpid()))
    while True:
        pass


def wait(marker: str) -> None:
    """Sleeps without end."""
    Path(marker).write_text(str(os.getpid()))
    time.sleep(3600)


def wait_once(marker: str) -> str:
    """Sleeps without end unless the file `marker` exists."""
    if not Path(marker).exists():
        wait(marker)
    return "well"


def fill(mebibytes: int) -> int:
    return len(bytes(mebibytes * MIB))


def crash() -> None:
    ctypes.string_at(0)


def abort() -> None:
    os.abort()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def say(text: str) -> str:
    return text


def fail(text: str) -> None:
    raise ValueError(text)


def costly_schema(branches: int = 40) -> str:
    """A JSON schema of some kilobytes that compiles for minutes and takes gigabytes."""
    one = '{"anyOf":[{"type":"string","pattern":"a%d"},{"type":"object"}]}'
    return '{"allOf":[' + ",".join(one % number for number in range(branches)) + "]}"
