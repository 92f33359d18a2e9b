"""The folder of `up` for its queue and logs; one `up` at a time may use it."""

import fcntl
import os
from pathlib import Path
from types import TracebackType

from .errors import UsageError


class DataDir:
    """The folder, locked while entered. Raises UsageError if it is not writable or is in use."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None

    @property
    def queue(self) -> Path:
        return self.path / "valkey"

    @property
    def _lock_file(self) -> Path:
        return self.path / "lock"

    def in_use(self) -> bool:
        """Whether an `up` runs with this folder."""
        try:
            lock = os.open(self._lock_file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(lock)
        return False

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def __enter__(self) -> "DataDir":
        try:
            self.queue.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f"cannot write to {self.path} ({error.strerror})", "choose another --data-dir"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._close()
            raise UsageError(
                f"another `headrace up` uses {self.path}", "stop it or choose another --data-dir"
            ) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
