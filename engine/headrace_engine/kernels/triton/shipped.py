"""Gives Triton's cache the precompiled kernels of the installation.

The engine's image has `share/headrace/triton` below Python's prefix: Triton's launcher, which would
need a C compiler, and the kernels of some models. TRITON_CACHE_MANAGER names the class here, and
TRITON_CACHE_DIR the folder for everything else (docs/decisions/0035).
"""

import sys
from pathlib import Path

from triton.runtime.cache import FileCacheManager

SHIPPED = Path("share/headrace/triton")


class ShippedFirst(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """Triton's file cache, with a read-only folder that is searched first."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        self._shipped = Path(sys.prefix) / SHIPPED / key

    def get_file(self, filename: str) -> str | None:
        path = self._shipped / filename
        found: str | None = str(path) if path.exists() else super().get_file(filename)
        return found

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The files of a kernel by name: those beside `filename`, wherever they were written."""
        if (self._shipped / filename).exists():
            paths = self._shipped.iterdir()
            return {path.name: str(path) for path in paths if not path.name.startswith("__grp__")}
        found: dict[str, str] | None = super().get_group(filename)
        return found
