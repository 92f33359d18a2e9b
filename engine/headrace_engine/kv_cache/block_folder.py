"""KV blocks as files in a folder that several engines share.

    FOLDER / fingerprint / first byte of the hash / hash

A file appears complete, by a rename, and its checksum covers the fingerprint, the hash and the
content. So a torn or foreign file is never read as KV. Its modification time is that of the last
use. All methods may run in any thread, and do I/O.
"""

import logging
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, Protocol
from uuid import uuid4

logger = logging.getLogger(__name__)

Buffers = Sequence[memoryview]

_HEADER = struct.Struct("<8sQ32s")  # what it is, the bytes of content, their checksum
_MAGIC = b"headrkv1"
# The system limits the buffers of one call.
_MOST_BUFFERS = 512
# An engine looks at the whole folder after it has written this share of its size, and then deletes
# files until the folder is KEPT full: two engines never exceed the size, each further one by SCAN.
SCAN = 1 / 16
KEPT = 7 / 8
# Seconds after which a reader states the use of a file again, and after which a file that was not
# renamed belongs to an engine that has ended.
USED_AGAIN = 60.0
ABANDONED = 3600.0
TEMPORARY = ".tmp"


class BlockStore(Protocol):
    """Stores blocks by hash. `read` and `write` raise OSError if the store fails."""

    def has(self, block_hash: bytes) -> bool: ...

    def read(self, block_hash: bytes, buffers: Buffers) -> bool:
        """Fills the buffers; False if the block is not there, or not as it was written."""

    def write(self, block_hash: bytes, buffers: Buffers) -> None: ...


class _File(NamedTuple):
    used: float
    size: int
    path: str


class BlockFolder:
    """The blocks of one `fingerprint` in `folder`, whose files take at most about `size` bytes.

    Raises OSError if the folder cannot be made.
    """

    def __init__(self, folder: Path, fingerprint: bytes, size: int) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._own = folder / fingerprint.hex()
        self._size = size
        self._unscanned = size  # bytes written since the last look at the whole folder
        self._own.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, block_hash: bytes) -> Path:
        """The file of a block."""
        name = block_hash.hex()
        return self._own / name[:2] / name

    def has(self, block_hash: bytes) -> bool:
        return self.path(block_hash).exists()

    def read(self, block_hash: bytes, buffers: Buffers) -> bool:
        """Deletes a file that is not as it was written."""
        path = self.path(block_hash)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            whole = self._read(file, block_hash, buffers)
            if whole and time.time() - os.fstat(file).st_mtime > USED_AGAIN:
                with suppress(OSError):
                    os.utime(file)
        finally:
            os.close(file)
        if not whole:
            logger.warning("a KV file is damaged and was deleted", extra={"file": str(path)})
            with suppress(OSError):
                path.unlink()
        return whole

    def _read(self, file: int, block_hash: bytes, buffers: Buffers) -> bool:
        size = sum(map(len, buffers))
        if os.fstat(file).st_size != _HEADER.size + size:
            return False
        header = os.pread(file, _HEADER.size, 0)
        offset = _HEADER.size
        for part in _parts(buffers):
            if os.preadv(file, part, offset) != sum(map(len, part)):
                return False
            offset += sum(map(len, part))
        return header == self._header(block_hash, buffers)

    def write(self, block_hash: bytes, buffers: Buffers) -> None:
        """Deletes files that were not used for longest if the folder is full."""
        path = self.path(block_hash)
        size = _HEADER.size + sum(map(len, buffers))
        if self._unscanned + size > self._size * SCAN:
            self._trim()
        self._unscanned += size
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_name(f"{uuid4().hex}{TEMPORARY}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(temporary, flags, 0o600)
        try:
            try:
                self._write(file, block_hash, buffers)
            finally:
                os.close(file)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _write(self, file: int, block_hash: bytes, buffers: Buffers) -> None:
        for part in _parts((memoryview(self._header(block_hash, buffers)), *buffers)):
            if os.writev(file, part) != sum(map(len, part)):
                raise OSError("the volume has no room for a KV block")

    def _header(self, block_hash: bytes, buffers: Buffers) -> bytes:
        digest = sha256(self._fingerprint + block_hash)
        for buffer in buffers:
            digest.update(buffer)
        return _HEADER.pack(_MAGIC, sum(map(len, buffers)), digest.digest())

    def _trim(self) -> None:
        """Deletes the files that were not used for longest, of all fingerprints."""
        self._unscanned = 0
        files = sorted(self._files())
        total = sum(file.size for file in files)
        for file in files:
            if total <= self._size * KEPT:
                break
            with suppress(OSError):  # another engine has deleted it
                os.unlink(file.path)
            total -= file.size

    def _files(self) -> Iterator[_File]:
        """All files of blocks. Deletes those that engines which have ended did not finish."""
        now = time.time()
        for folder in _entries(self._folder):
            for part in _entries(folder):
                for path in _entries(part):
                    with suppress(OSError):
                        found = path.stat()
                        if path.suffix == TEMPORARY and now - found.st_mtime > ABANDONED:
                            path.unlink()
                        else:
                            yield _File(found.st_mtime, found.st_size, str(path))


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # a file, or deleted by another engine
        return []


def _parts(buffers: Buffers) -> Iterator[Buffers]:
    for begin in range(0, len(buffers), _MOST_BUFFERS):
        yield buffers[begin : begin + _MOST_BUFFERS]
