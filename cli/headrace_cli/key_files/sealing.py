"""`headrace sealing`: makes and changes the keyring with which prompts and answers are sealed.

The first key seals, all keys open. A new key is added at the end, so that all processes can open
its records before any process seals with it.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from headrace_common.sealing.keyring import (
    SECRET_FIELD,
    KeyringError,
    SealingKey,
    new_key,
    read_keyring,
    write_keyring,
)

from ..errors import UsageError
from ..tables import Output, plain_table
from .secret_files import locked, replace

Keys = Sequence[SealingKey]


@dataclass(frozen=True, slots=True)
class KeyringCommands:
    """The commands on a file of keys."""

    file: Path
    output: Output

    def create(self) -> None:
        """Makes the file with one key. Raises UsageError if the file exists."""
        with locked(self.file):
            if self.file.exists():
                raise UsageError(f"{self.file} is there already", "see headrace sealing add")
            replace(self.file, write_keyring([new_key()]))
        self.show()

    def add(self) -> None:
        """Adds a key that opens and does not seal yet."""
        self._change(lambda keys: [*keys, new_key()])
        self.output.notes.print(
            "Once all gateways and engines have read it, seal with it: headrace sealing use."
        )

    def use(self, name: str) -> None:
        """Seals with a key from now on."""
        self._change(lambda keys: [self._named(keys, name), *self._others(keys, name)])

    def remove(self, name: str) -> None:
        """Removes a key; records sealed with it can no longer be opened."""

        def change(keys: Keys) -> Keys:
            if self._named(keys, name) == keys[0]:
                raise UsageError(f"{name} seals", "use another key first: headrace sealing use")
            return self._others(keys, name)

        self._change(change)

    def show(self) -> None:
        """Lists the ids of the keys."""
        keys = self._read()
        uses = ["seals and opens", *["opens"] * (len(keys) - 1)]
        table = plain_table("id", "use")
        for key, use in zip(keys, uses, strict=True):
            table.add_row(key.name, use)
        listed = [{"id": key.name, "seals": key == keys[0]} for key in keys]
        self.output.show(listed, table)

    def secret(self, name: str, namespace: str | None) -> None:
        """Prints the file as a Kubernetes Secret."""
        metadata = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
        content = base64.b64encode(write_keyring(self._read()).encode()).decode()
        manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "data": {SECRET_FIELD: content},
        }
        self.output.raw(yaml.safe_dump(manifest, sort_keys=False))

    def _change(self, change: Callable[[Keys], Keys]) -> None:
        with locked(self.file):
            replace(self.file, write_keyring(change(self._read())))
        self.show()

    def _read(self) -> Keys:
        try:
            return read_keyring(self.file.read_bytes()).keys
        except FileNotFoundError as error:
            raise UsageError(f"there is no {self.file}", "headrace sealing create") from error
        except (OSError, KeyringError) as error:
            raise UsageError(f"{self.file} cannot be read", str(error)) from error

    def _named(self, keys: Keys, name: str) -> SealingKey:
        found = [key for key in keys if key.name == name]
        if not found:
            raise UsageError(f"there is no key {name}", "see headrace sealing list")
        return found[0]

    def _others(self, keys: Keys, name: str) -> Keys:
        return [key for key in keys if key.name != name]
