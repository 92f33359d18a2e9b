"""Stores choices across processes, in one JSON file for each kind of device. The file has the
versions for which its choices are valid."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from .autotuner import Choice

logger = logging.getLogger(__name__)


class ChoiceTable:
    """The stored choices. `versions` are those of everything that a measurement depends on."""

    def __init__(self, folder: Path, device: str, versions: Mapping[str, str]) -> None:
        name = "".join(one if one.isalnum() else "_" for one in device)
        self.file, self._versions = folder / f"{name}.json", dict(versions)

    def read(self) -> dict[str, str]:
        """Reads choices by kernel; none if there is no file, or other versions wrote it.

        Raises ConfigError for a file that is not such a table.
        """
        return {kernel: str(entry["chosen"]) for kernel, entry in self._kernels().items()}

    def write(self, choices: Sequence[Choice]) -> None:
        """Stores the final choices; keeps those of other models."""
        kernels = self._kernels()
        for choice in choices:
            if choice.final:
                kernels[choice.kernel] = asdict(choice)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(f".{os.getpid()}")
        table = {"versions": self._versions, "kernels": kernels}
        part.write_text(json.dumps(table, indent=2) + "\n")
        part.replace(self.file)

    def _kernels(self) -> dict[str, Any]:
        if not self.file.exists():
            return {}
        found = self._parsed()
        if found.get("versions") == self._versions:
            return dict(found["kernels"])
        extra = {"file": str(self.file), "found": found.get("versions"), "wanted": self._versions}
        logger.info(
            "kernels are measured again: the table was made with other versions", extra=extra
        )
        return {}

    def _parsed(self) -> dict[str, Any]:
        try:
            found = json.loads(self.file.read_text())
        except ValueError as error:
            raise ConfigError(f"{self.file} is not JSON ({error}): remove it") from error
        kernels = found.get("kernels") if isinstance(found, dict) else None
        if not isinstance(kernels, dict) or not all("chosen" in one for one in kernels.values()):
            raise ConfigError(f"{self.file} is not a table of measured kernels: remove it")
        return dict(found)
