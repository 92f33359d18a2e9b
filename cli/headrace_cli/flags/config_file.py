"""Reads a file of flags in vLLM's format: YAML whose keys are the flags' names without dashes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ..errors import UsageError

_FORMAT = "each line is a flag without its dashes and a value, such as max-model-len: 4096"


def config_words(path: Path) -> list[str]:
    """The file as words of a command line. Raises UsageError if it is unreadable."""
    try:
        found: Any = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"--config: cannot read {path} ({error.strerror})") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"--config: {path} is not YAML", _FORMAT) from error
    if not isinstance(found, dict):
        raise UsageError(f"--config: {path} has no flags", _FORMAT)
    return [word for key, value in found.items() for word in _words(f"--{key}", value)]


def _words(flag: str, value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _words(flag, one)
    elif isinstance(value, bool):
        yield f"{flag}={str(value).lower()}"
    elif isinstance(value, dict):
        yield f"{flag}={json.dumps(value)}"
    elif value is not None:
        yield f"{flag}={value}"
