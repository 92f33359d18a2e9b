"""Reads a Redis user's name and password from files for every new connection.

So a Secret that is mounted as a folder can be rotated without a restart.
"""

from pathlib import Path

from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError

MOST_BYTES = 4096


class CredentialFiles(CredentialProvider):
    """The files `username` and `password` in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get_credentials(self) -> tuple[str, str]:
        """Raises redis' ConnectionError if they cannot be read: new ones may come soon."""
        try:
            return self._read("username"), self._read("password")
        except (OSError, UnicodeDecodeError) as error:
            raise RedisConnectionError(
                f"redis credentials {self._folder}: {error}; it must have the files username and "
                "password"
            ) from error

    async def get_credentials_async(self) -> tuple[str, str]:
        """Like `get_credentials`: the files are small. redis-py's own version logs a warning."""
        return self.get_credentials()

    def _read(self, name: str) -> str:
        with (self._folder / name).open("rb") as file:
            return file.read(MOST_BYTES).decode().strip("\r\n")
