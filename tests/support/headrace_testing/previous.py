"""The release before this one, for tests that run processes of both."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .processes import Running

# A checkout of that release with its environment: `make test-upgrade` makes it.
FOLDER = "HEADRACE_TEST_PREVIOUS"


def start_previous(
    module: str, arguments: Sequence[str], log: Path, env: Mapping[str, str]
) -> Running:
    """A Starter of programs as that release has them."""
    folder = Path(os.environ[FOLDER])
    with log.open("ab") as out:
        return subprocess.Popen(
            [folder / ".venv/bin/python", "-m", module, *arguments],
            cwd=folder,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in env.items() if name != "PYTHONPATH"},
        )
