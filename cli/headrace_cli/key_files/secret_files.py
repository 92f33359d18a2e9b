"""Changes files of secrets that running processes read: one writer at a time, in one step."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UsageError


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Locks a file for one writer. The lock is a separate file, since the file is replaced."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise _unwritten(file, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def replace(file: Path, text: str) -> None:
    """Replaces a file in one step, with the mode of the old one or readable only by its owner."""
    mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
    try:
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        with os.fdopen(handle, "w") as new:
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
        os.chmod(name, mode)
        os.replace(name, file)
    except OSError as error:
        raise _unwritten(file, error) from error


def _unwritten(file: Path, error: OSError) -> UsageError:
    return UsageError(f"{file} cannot be written", error.strerror or type(error).__name__)
