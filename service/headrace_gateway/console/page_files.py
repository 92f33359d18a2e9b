"""The files of the console's page, read once from the package."""

import hashlib
import mimetypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
_TEXT = frozenset({"text/html", "text/css", "text/javascript", "text/plain"})


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, with its media type and its entity tag."""

    content: bytes
    media_type: str
    etag: str


def page_files(folder: Path = FOLDER) -> Mapping[str, PageFile]:
    """Reads all files by name; hidden ones and folders are not part of the page."""
    names = (path for path in sorted(folder.iterdir()) if path.is_file())
    return {path.name: _page_file(path) for path in names if not path.name.startswith(".")}


def page_paths(files: Iterable[str]) -> frozenset[str]:
    """Returns the paths at which the page's files are. They hold no data and need no key."""
    return frozenset({"/", *(f"/console/{name}" for name in files)})


def _page_file(path: Path) -> PageFile:
    content = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    media_type = f"{kind}; charset=utf-8" if kind in _TEXT else kind
    return PageFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
