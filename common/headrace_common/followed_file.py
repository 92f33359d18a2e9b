"""Follows a file that others change, such as a mounted Secret: reads it again after each change.

If the file cannot be read or used, the previous content stays in use and the reason is logged.
"""

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from .errors import HeadraceError, SettingsError

logger = logging.getLogger(__name__)

POLL_S = 2.0
Content = TypeVar("Content")
Sleep = Callable[[float], Awaitable[object]]


class FollowedFile(ABC, Generic[Content]):
    """The content of a file, followed. Without a path it does nothing.

    `sleep` waits between two checks of the file. `failing` is why the present file cannot be used;
    None if it is used.
    """

    name: ClassVar[str]
    """The content of the file."""
    setting: ClassVar[str]
    remedy: ClassVar[str]
    max_bytes: ClassVar[int]

    def __init__(self, path: Path | None, sleep: Sleep = asyncio.sleep) -> None:
        """Reads the file. Raises SettingsError."""
        self._path = path
        self._sleep = sleep
        self._task: asyncio.Task[None] | None = None
        self.failing: str | None = None
        if path is not None:
            self.load()

    @abstractmethod
    def _parse(self, data: bytes) -> Content:
        """Raises HeadraceError. Called in a thread."""

    @abstractmethod
    def _use(self, content: Content) -> Mapping[str, object]:
        """Uses new content; returns fields for the log."""

    @property
    def failed(self) -> str | None:
        """The error if the watch has ended, which is a bug; None while it runs."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            return None
        return f"the watch of the {self.name} has failed; the process must be restarted"

    def load(self) -> None:
        """Reads the file, changed or not. Raises SettingsError."""
        assert self._path is not None
        try:
            self._seen = _version(self._path)
            content = self._read(self._path)
        except (OSError, HeadraceError) as error:
            raise SettingsError(
                f"{self.setting}: {self._path}: {_reason(error)}; make one with {self.remedy}"
            ) from error
        logger.info("%s read", self.name, extra=self._use(content))

    def start(self) -> None:
        """Follows the file from now on."""
        if self._path is not None:
            self._task = asyncio.create_task(self._watch(), name=self.name)
            self._task.add_done_callback(self._log_failure)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def refresh(self) -> None:
        """Reads the file again if it has changed."""
        assert self._path is not None
        try:
            version = _version(self._path)
            if version == self._seen:
                return
            content = await asyncio.to_thread(self._read, self._path)
        except (OSError, HeadraceError) as error:
            self._keep(_reason(error))
            return
        # Noted before reading: a change during the read is found by the next check.
        self._seen, self.failing = version, None
        logger.info("%s read again", self.name, extra=self._use(content))

    def _read(self, path: Path) -> Content:
        with path.open("rb") as file:
            return self._parse(file.read(self.max_bytes + 1))

    async def _watch(self) -> None:
        while True:
            await self._sleep(POLL_S)
            await self.refresh()

    def _keep(self, reason: str) -> None:
        """Logs a failure once; the file, perhaps incomplete, is read again every few seconds."""
        if reason != self.failing:
            extra = {"path": str(self._path), "error": reason}
            logger.error("%s cannot be read, the known ones stay", self.name, extra=extra)
        self.failing = reason

    def _log_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.critical(
                "the watch of the %s failed; restart the process",
                self.name,
                exc_info=task.exception(),
            )


_Version = tuple[int, int, int, int]
"""Device, inode, size and time of change of a file. A Secret's update swaps a link to another."""


def _version(path: Path) -> _Version:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _reason(error: OSError | HeadraceError) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
