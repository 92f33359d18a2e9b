"""Fetches an adapter from a store that speaks S3, for the time in which its files are opened.

The store's address and credentials are the environment's, by the names of Amazon's tools:
AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, and those of roles.
"""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from ..core.errors import CheckpointError
from .adapter import WEIGHTS_FILE
from .adapter_config import CONFIG_FILE

MAX_CONFIG_BYTES = 2**20
# Seconds for one adapter, and without a byte.
FETCH_S = 600.0
SILENCE_S = 30.0
RETRIES = 3
_PIECE = 2**20
_URI = re.compile(r"s3://([a-z0-9][a-z0-9.-]+)/([^\s?#]+)")


def is_in_object_storage(location: str) -> bool:
    return location.startswith("s3://")


@contextmanager
def fetched(uri: str, room: int, clock: Callable[[], float] = time.monotonic) -> Iterator[Path]:
    """A folder with the two files of the adapter at `s3://bucket/folder`, removed after the block.

    Files that are open stay readable. Raises CheckpointError if the adapter cannot be fetched, has
    more than `room` bytes or does not fit the disk.
    """
    match = _URI.fullmatch(uri)
    if match is None:
        raise CheckpointError(f"{uri!r:.200} is not an adapter's place: give s3://bucket/folder")
    with TemporaryDirectory(prefix="headrace-adapter-") as folder:
        fetch = _Fetch(match[1], match[2].strip("/"), clock)
        for name, most in ((CONFIG_FILE, MAX_CONFIG_BYTES), (WEIGHTS_FILE, room)):
            fetch.save(name, Path(folder), most)
        yield Path(folder)


class _Fetch:
    """One adapter's download, which ends within FETCH_S seconds."""

    def __init__(self, bucket: str, prefix: str, clock: Callable[[], float]) -> None:
        from obstore.store import S3Store

        self._uri, self._prefix = f"s3://{bucket}/{prefix}", prefix
        self._clock, self._until = clock, clock() + FETCH_S
        # Plain HTTP only where the environment names such an address.
        self._store = S3Store(
            bucket,
            client_options={
                "allow_http": True,
                "timeout": timedelta(seconds=FETCH_S),
                "read_timeout": timedelta(seconds=SILENCE_S),
            },
            retry_config={
                "max_retries": RETRIES,
                "retry_timeout": timedelta(seconds=FETCH_S),
            },
        )

    def save(self, name: str, folder: Path, most: int) -> None:
        """Writes a file of the adapter. Raises CheckpointError."""
        import obstore
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        place = f"{self._uri}/{name}"
        try:
            found = obstore.get(self._store, f"{self._prefix}/{name}")
            self._check_size(place, found.meta["size"], most, folder)
            with (folder / name).open("wb") as file:
                for piece in found.stream(_PIECE):
                    if self._clock() >= self._until:
                        raise CheckpointError(
                            f"{place} was not fetched within {FETCH_S:.0f} s: copy the adapter to "
                            "a store that is nearer, or to a volume"
                        )
                    file.write(piece)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{place} does not exist: an adapter's folder has {CONFIG_FILE} and {WEIGHTS_FILE}"
            ) from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise CheckpointError(
                f"{place} may not be read with the engine's credentials: give it others "
                "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or a role)"
            ) from error
        except (BaseError, OSError, ValueError) as error:
            reason = str(error).partition("\n")[0][:300]
            raise CheckpointError(
                f"{place} cannot be fetched: {reason}; check the engine's AWS_ variables: the "
                "store's address, region, credentials"
            ) from error

    @staticmethod
    def _check_size(place: str, size: int, most: int, folder: Path) -> None:
        if size > most:
            raise CheckpointError(f"{place} has {size} bytes, but only {most} are free")
        free = shutil.disk_usage(folder).free
        if size > free:
            raise CheckpointError(f"{place} has {size} bytes, but {folder} has only {free} free")
