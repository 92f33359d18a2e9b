"""The API keys that this gateway accepts: looked up by hash, reloaded when their file changes.

Never logs, stores or returns a key.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from headrace_common.config.api_keys import MAX_FILE_BYTES, ApiKey, read_keys
from headrace_common.followed_file import FollowedFile, Sleep

_NO_DIGEST = hashlib.sha256(b"").digest()


def _utc_now() -> datetime:
    return datetime.now(UTC)


class KeyRing:
    """A set of keys that can be looked up."""

    def __init__(self, keys: Sequence[ApiKey], clock: Callable[[], datetime] = _utc_now) -> None:
        self.keys = tuple(keys)
        self._by_digest = {key.digest: key for key in keys}
        self._clock = clock

    def find(self, secret: bytes) -> ApiKey | None:
        """Returns the key, unless it is unknown or has expired.

        Takes the same time for every secret: only hashes are looked up and compared, and a client
        that cannot invert SHA-256 cannot choose them.
        """
        digest = hashlib.sha256(secret).digest()
        key = self._by_digest.get(digest)
        known = hmac.compare_digest(digest, _NO_DIGEST if key is None else key.digest)
        if not known or key is None or key.expired(self._clock()):
            return None
        return key

    def named(self, key_id: str) -> ApiKey | None:
        """Returns the key with this id, unless it is unknown or has expired."""
        key = next((key for key in self.keys if key.id == key_id), None)
        return None if key is None or key.expired(self._clock()) else key


class KeyFile(FollowedFile[tuple[ApiKey, ...]]):
    """The keys of a file that other programs change."""

    name = "api keys"
    setting = "api_keys_file"
    remedy = "headrace keys create"
    max_bytes = MAX_FILE_BYTES

    def __init__(
        self,
        path: Path,
        clock: Callable[[], datetime] = _utc_now,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """Reads the file. Raises SettingsError."""
        self._clock = clock
        super().__init__(path, sleep)

    def find(self, secret: bytes) -> ApiKey | None:
        """Returns the key as KeyRing.find does, in the present keys."""
        return self.ring.find(secret)

    def _parse(self, data: bytes) -> tuple[ApiKey, ...]:
        return read_keys(data)

    def _use(self, content: tuple[ApiKey, ...]) -> Mapping[str, object]:
        self.ring = KeyRing(content, self._clock)
        return {"keys": len(content)}
