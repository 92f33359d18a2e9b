"""Typed access to a GGUF file's metadata, with errors that name file and key."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import TokenizerError


class Metadata:
    """The values by their keys, as the file has them."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self._values = path, values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def error(self, key: str, wanted: str) -> TokenizerError:
        value = self._values.get(key)
        found = "absent" if value is None else f"{value!r:.80}"
        return TokenizerError(f"{self.path}: {key} must be {wanted}, not {found}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a text")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.error(key, "a whole number above 0")
        return value

    def count(self, key: str, default: int) -> int:
        """A whole number, 0 or above."""
        return self.integer(key, default) if self._values.get(key, default) else 0

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.error(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        return self._list(key, str, "a list of texts")

    def integers(self, key: str) -> list[int]:
        return self._list(key, int, "a list of whole numbers")

    def numbers(self, key: str) -> list[float]:
        return self._list(key, float, "a list of floats")

    def _list(self, key: str, kind: type, wanted: str) -> list[Any]:
        """A list, whose elements have one type in the file."""
        value = self._values.get(key)
        if not isinstance(value, list) or not all(type(each) is kind for each in value):
            raise self.error(key, wanted)
        return value
