"""The API keys that this gateway accepts: looked up by hash, read again when their file changes.

A file that cannot be read or used changes nothing: the keys known stay, the log and the metrics
tell. Never logs, keeps or returns a key.
"""

import asyncio
import hashlib
import hmac
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from headrace_common.api_keys import MAX_FILE_BYTES, ApiKey, ApiKeysError, read_keys
from headrace_common.errors import SettingsError

logger = logging.getLogger(__name__)

POLL_S = 2.0
_NOBODY = hashlib.sha256(b"").digest()

Version = tuple[int, int, int, int]
"""Device, inode, size and time of change of a file. A Secret's update swaps a link to another."""


def _utc_now() -> datetime:
    return datetime.now(UTC)


class KeyRing:
    """Some keys, to be looked up."""

    def __init__(self, keys: Sequence[ApiKey], clock: Callable[[], datetime] = _utc_now) -> None:
        self.keys = tuple(keys)
        self._by_digest = {key.digest: key for key in keys}
        self._clock = clock

    def find(self, secret: bytes) -> ApiKey | None:
        """The key, unless it is unknown or has expired.

        Takes the same way and time for all: only hashes are looked up and compared, and who cannot
        invert SHA-256 cannot choose them.
        """
        digest = hashlib.sha256(secret).digest()
        key = self._by_digest.get(digest)
        known = hmac.compare_digest(digest, _NOBODY if key is None else key.digest)
        if not known or key is None or key.expired(self._clock()):
            return None
        return key

    def named(self, key_id: str) -> ApiKey | None:
        """The key with this id, unless it is unknown or has expired."""
        key = next((key for key in self.keys if key.id == key_id), None)
        return None if key is None or key.expired(self._clock()) else key


class KeyFile:
    """The keys of a file that others change. `sleep` waits between two looks at it.

    `failing` says why the file as it is now cannot be used, None where it is.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], datetime] = _utc_now,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._path = path
        self._clock = clock
        self._sleep = sleep
        self._seen: Version | None = None
        self._task: asyncio.Task[None] | None = None
        self.failing: str | None = None
        self.ring = KeyRing((), clock)

    @property
    def failed(self) -> BaseException | None:
        """What ended the watch: a bug, and the process must be restarted."""
        task = self._task
        if task is None or not task.done() or task.cancelled():
            return None
        return task.exception() or RuntimeError("the watch of the keys ended")

    def find(self, secret: bytes) -> ApiKey | None:
        """As KeyRing.find, in the keys of now."""
        return self.ring.find(secret)

    def load(self) -> None:
        """Reads the file. Raises SettingsError."""
        try:
            self._seen = self._version()
            self.ring = KeyRing(_read(self._path), self._clock)
        except (OSError, ApiKeysError) as error:
            raise SettingsError(
                f"api_keys_file: {self._path}: {_reason(error)}; make one with headrace keys create"
            ) from error

    async def start(self) -> None:
        """Reads the file, and again after each change. Raises SettingsError."""
        await asyncio.to_thread(self.load)
        self._task = asyncio.create_task(self._watch(), name="api keys")
        self._task.add_done_callback(_log_failure)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await self._sleep(POLL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Reads the file again where it has changed."""
        try:
            version = self._version()
            if version == self._seen:
                return
            keys = await asyncio.to_thread(_read, self._path)
        except (OSError, ApiKeysError) as error:
            self._keep(_reason(error))
            return
        # Noted as of before reading: what was written meanwhile is read with the next look.
        self._seen, self.failing = version, None
        self.ring = KeyRing(keys, self._clock)
        logger.info("api keys read again", extra={"keys": len(keys)})

    def _keep(self, reason: str) -> None:
        """Says it once: it is tried again every few seconds, since it may be half written."""
        if reason != self.failing:
            extra = {"path": str(self._path), "error": reason, "keys": len(self.ring.keys)}
            logger.error("api keys cannot be read, those known stay", extra=extra)
        self.failing = reason

    def _version(self) -> Version:
        found = os.stat(self._path)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: Path) -> tuple[ApiKey, ...]:
    with path.open("rb") as file:
        return read_keys(file.read(MAX_FILE_BYTES + 1))


def _reason(error: OSError | ApiKeysError) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("the watch of the api keys failed", exc_info=task.exception())
