"""A digest of a checkpoint's content, which two copies of a model share and other models do not."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import file_digest, sha256
from os import SEEK_END
from pathlib import Path
from string import hexdigits

# Files that are read at once.
READERS = 4
# Bytes at each end of a file that `checkpoint_sketch` reads.
SKETCHED = 2**16

# Size and time of change (ns) of files by name.
FileStamps = Mapping[str, tuple[int, int]]


def file_stamps(checkpoint: Path) -> FileStamps:
    """Tells a checkpoint's files, or the GGUF file, from others without reading them. Raises
    OSError."""
    found = [checkpoint] if checkpoint.is_file() else _files(checkpoint)
    stats = {file.name: file.stat() for file in found}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def checkpoint_digest(folder: Path) -> bytes:
    """The digest of config.json and of the tensors. Reads all files, except those of a hub's cache,
    whose names are digests. Raises OSError."""
    files = _files(folder)
    digest = sha256()
    with ThreadPoolExecutor(READERS) as readers:
        for file, content in zip(files, readers.map(_content_digest, files), strict=True):
            digest.update(sha256(file.name.encode()).digest() + content)
    return digest.digest()


def checkpoint_sketch(checkpoint: Path) -> str:
    """A digest, made in milliseconds, of the names, the sizes and both ends of a checkpoint's
    files, or of the GGUF file. It tells models apart, but not two with the same ends. Raises
    OSError."""
    digest = sha256()
    for path in [checkpoint] if checkpoint.is_file() else _files(checkpoint):
        name = "" if checkpoint.is_file() else path.name
        with path.open("rb") as file:
            size = file.seek(0, SEEK_END)
            digest.update(sha256(name.encode()).digest() + size.to_bytes(8))
            for start in (0, max(0, size - SKETCHED)):
                file.seek(start)
                digest.update(file.read(SKETCHED))
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), folder / "config.json"])


def _content_digest(path: Path) -> bytes:
    stored = path.resolve()
    name = stored.name
    if stored.parent.name == "blobs" and len(name) == 64 and not set(name) - set(hexdigits):
        return bytes.fromhex(name)
    with path.open("rb") as file:
        return file_digest(file, "sha256").digest()
