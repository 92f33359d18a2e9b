"""`headrace` and other programs in the process of the tests, which has imported most modules."""

import os
import runpy
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

from headrace_cli.main import main


def headrace(
    *arguments: str, typed: str = "", env: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Runs a command that neither becomes another program nor needs a terminal; returns its exit
    status and what it printed. `env` replaces our environment."""
    out, err, status = StringIO(), StringIO(), 0
    command = ["headrace", *arguments]
    with (
        patch.object(sys, "argv", command),
        patch.object(sys, "stdin", StringIO(typed)),
        patch.dict(os.environ, env or os.environ, clear=True),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            assert ended.code is None or isinstance(ended.code, int), ended.code
            status = ended.code or 0
    return CompletedProcess(command, status, out.getvalue(), err.getvalue())


def program(file: Path, env: Mapping[str, str] | None = None) -> str:
    """Runs a Python program; returns what it printed. `env` replaces our environment."""
    out = StringIO()
    with (
        patch.object(sys, "argv", [str(file)]),
        patch.dict(os.environ, env or os.environ, clear=True),
        redirect_stdout(out),
    ):
        runpy.run_path(str(file), run_name="__main__")
    return out.getvalue()
