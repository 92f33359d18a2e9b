"""Typed access to one JSON object of a checkpoint, with errors that name file and field.

A null field counts as absent. Callers interpret the fields.
"""

from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from .checkpoint import JsonObject


class Fields:
    """The fields of one object. Messages put `prefix` before their names, as in
    `rope_parameters.`"""

    def __init__(self, path: Path, content: JsonObject, prefix: str = "") -> None:
        self.path, self._content, self._prefix = path, content, prefix

    def with_field(self, name: str, value: object) -> "Fields":
        """The same fields, of which one has another value."""
        return Fields(self.path, {**self._content, name: value}, self._prefix)

    def __contains__(self, name: str) -> bool:
        return name in self._content

    def get(self, name: str, default: Any) -> Any:
        value = self._content.get(name)
        return default if value is None else value

    def error(self, name: str, wanted: str) -> ConfigError:
        value = self._content.get(name)
        return ConfigError(f"{self.path}: {self._prefix}{name} must be {wanted}, not {value!r:.80}")

    def require(self, name: str, allowed: tuple[Any, ...], default: Any) -> None:
        if self.get(name, default) not in allowed:
            raise self.error(name, f"one of {', '.join(map(str, allowed))} for the native decoder")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.error(name, "a whole number above 0")
        return value

    def same_integer(self, name: str, default: int | None) -> int:
        """A whole number. It may be a list that repeats the same number for each layer."""
        values = self.get(name, None)
        if isinstance(values, list) and values:
            if values != values[:1] * len(values):
                raise self.error(name, "the same number for all layers")
            return Fields(self.path, {name: values[0]}, self._prefix).integer(name)
        return self.integer(name, default)

    def count(self, name: str, default: int) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise self.error(name, "a whole number, 0 or above")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.error(name, "a number above 0")
        return float(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        values = self.get(name, None)
        wanted = f"a list of {count} numbers above 0"
        if not isinstance(values, list) or len(values) != count:
            raise self.error(name, wanted)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise self.error(name, wanted)
        return tuple(map(float, values))

    def optional(self, name: str, default: float | None) -> float | None:
        """A number, or None; null means None, and only an absent field takes the default."""
        if name not in self._content:
            return default
        return None if self._content[name] is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def switch(self, name: str, default: bool = False) -> bool:
        """A flag that some checkpoints write as a whole number: 0 is false."""
        value = self.get(name, default)
        if not isinstance(value, int):
            raise self.error(name, "true or false")
        return bool(value)

    def optional_integer(self, name: str, default: int | None) -> int | None:
        """A whole number, or None; null means None, and only an absent field takes the default."""
        if name not in self._content:
            return default
        return None if self._content[name] is None else self.integer(name)

    def part(self, name: str) -> "Fields":
        """The fields of an object in this one."""
        return Fields(self.path, self.object(name), prefix=f"{self._prefix}{name}.")

    def object(self, name: str) -> JsonObject:
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return value
