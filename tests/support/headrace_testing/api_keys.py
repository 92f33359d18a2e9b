"""API key files for tests, changed in the ways in which people and the kubelet change them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace_common.config.api_keys import ApiKey, KeyLimits, new_key, write_keys

CREATED = datetime(2027, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class KeyBook:
    """A file of keys, and the secrets of the keys that `add` has made."""

    path: Path
    secrets: dict[str, str] = field(default_factory=dict)
    keys: dict[str, ApiKey] = field(default_factory=dict)

    def add(self, key_id: str, *, limits: dict[str, int] | None = None, **fields: Any) -> str:
        """Adds a key to the file, or replaces the one with this id; returns its secret."""
        made = new_key(key_id, CREATED, limits=KeyLimits(**(limits or {})), **fields)
        self.secrets[key_id], self.keys[key_id] = made.secret, made.entry
        self.write()
        return made.secret

    def change(self, key_id: str, **fields: Any) -> None:
        """Changes fields of a key."""
        self.keys[key_id] = self.keys[key_id].model_copy(update=fields)
        self.write()

    def remove(self, key_id: str) -> None:
        del self.keys[key_id]
        self.write()

    def write(self, text: str | None = None) -> None:
        """Replaces the file in one step, as `rename` does."""
        content = write_keys(list(self.keys.values())) if text is None else text
        new = self.path.with_suffix(".new")
        new.write_text(content)
        new.replace(self.path)

    def headers(self, key_id: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.secrets[key_id]}"}


class MountedSecret:
    """A folder as the kubelet mounts a Secret: links through `..data`, swapped in one step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._updates = 0
        folder.mkdir()

    @property
    def path(self) -> Path:
        return self._folder / "keys.yaml"

    def update(self, keys: Sequence[ApiKey]) -> None:
        self._updates += 1
        content = self._folder / f"..2027_{self._updates}"
        content.mkdir()
        (content / "keys.yaml").write_text(write_keys(keys))
        link = self._folder / "..data_tmp"
        link.symlink_to(content.name)
        os.replace(link, self._folder / "..data")
        if not self.path.is_symlink():
            self.path.symlink_to("..data/keys.yaml")
