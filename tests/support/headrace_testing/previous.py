"""The previous release, for tests that run processes of both releases."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from .processes import Running, start_program

# A checkout of the previous release with its environment; `make test-upgrade` makes it.
FOLDER = "HEADRACE_TEST_PREVIOUS"


def start_previous(
    module: str, arguments: Sequence[str], log: Path, env: Mapping[str, str]
) -> Running:
    """A function that starts programs of the previous release."""
    python = Path(os.environ[FOLDER]) / ".venv/bin/python"
    own = {name: value for name, value in env.items() if name != "PYTHONPATH"}
    return start_program(module, arguments, log, own, str(python))
