"""A digest of a checkpoint's content, which two copies of a model share and other models do not."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import file_digest, sha256
from pathlib import Path
from string import hexdigits

# Files that are read at once.
READERS = 4
# Samples of a file, evenly spaced from its beginning.
PAGES = 64
PAGE_BYTES = 16_384

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


def sampled_digest(checkpoint: Path) -> str:
    """A digest of a checkpoint's files, or of the GGUF file, from the size and PAGES samples of
    each. It tells revisions of a model apart without reading all weights. Raises OSError."""
    digest = sha256()
    for file in [checkpoint] if checkpoint.is_file() else _files(checkpoint):
        size = file.stat().st_size
        digest.update(repr((file.name, size)).encode())
        with file.open("rb") as content:
            for number in range(PAGES):
                content.seek(size * number // PAGES)
                digest.update(content.read(PAGE_BYTES))
    return digest.hexdigest()[:16]


def _files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), folder / "config.json"])


def _content_digest(path: Path) -> bytes:
    stored = path.resolve()
    name = stored.name
    if stored.parent.name == "blobs" and len(name) == 64 and not set(name) - set(hexdigits):
        return bytes.fromhex(name)
    with path.open("rb") as file:
        return file_digest(file, "sha256").digest()
