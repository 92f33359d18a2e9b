"""Compiled kernels of earlier sessions, from which Triton fills an empty cache. The keys contain a
kernel's source, options and device, so only what has changed is compiled again.

    TRITON_CACHE_MANAGER=triton.runtime.cache:RemoteCacheManager
    TRITON_REMOTE_CACHE_BACKEND=headrace_testing.kernel_store:KernelStore
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from triton import knobs
from triton.runtime.cache import RemoteCacheBackend

FOLDER = Path(knobs.cache.get_triton_dir("headrace-tests"))
ENVIRONMENT: Mapping[str, str] = {
    "TRITON_CACHE_MANAGER": "triton.runtime.cache:RemoteCacheManager",
    "TRITON_REMOTE_CACHE_BACKEND": f"{__name__}:KernelStore",
    "TRITON_STORE_BINARY_ONLY": "1",  # what is stored must not depend on the program
}


class KernelStore(RemoteCacheBackend):  # type: ignore[misc]  # Triton has no types
    """The files of one key."""

    def __init__(self, key: str) -> None:
        self._folder = FOLDER / key

    def get(self, filenames: list[str]) -> dict[str, bytes]:
        paths = [self._folder / name for name in filenames]
        return {path.name: path.read_bytes() for path in paths if path.exists()}

    def put(self, filename: str, data: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(data)
        Path(file.name).rename(self._folder / filename)
