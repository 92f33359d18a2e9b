"""Programs on the null CUDA device that are forked from one process that has imported torch,
because the import takes longer than some of them run."""

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triton.runtime.cache import triton_key

PRELOADED = (
    "headrace_testing.decode",
    "headrace_testing.few_candidates",
)


class Programs:
    """Runs programs, one at a time. `environment` is that of a process that sees the device."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str | None],
        prefix: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Calls `main(arguments)` of a module. `environment` adds variables, or removes those that
        are None; `prefix` replaces sys.prefix."""
        changed = {**self._environment, **environment}
        kept = {name: value for name, value in changed.items() if value is not None}
        with tempfile.TemporaryDirectory() as folder:
            files = [str(Path(folder) / name) for name in ("stdout", "stderr")]
            task = {
                "module": module,
                "arguments": list(arguments),
                "environment": kept,
                "prefix": str(prefix or sys.prefix),
                "files": files,
            }
            assert self._server.stdin is not None and self._server.stdout is not None
            self._server.stdin.write(json.dumps(task) + "\n")
            self._server.stdin.flush()
            code = int(self._server.stdout.readline())
            output, errors = (Path(file).read_text() for file in files)
        return subprocess.CompletedProcess([module, *arguments], code, output, errors)

    def close(self) -> None:
        self._server.communicate()


def _become(task: dict[str, Any]) -> int:
    """Runs the task in this process; returns its exit code."""
    for stream, file in zip((1, 2), task["files"], strict=True):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY, 0o644), stream)
    os.environ.clear()
    os.environ.update(task["environment"])
    sys.prefix = task["prefix"]
    try:
        code: int = importlib.import_module(task["module"]).main(task["arguments"]) or 0
    except Exception:  # noqa: BLE001  as the interpreter would at the top of a program
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    """Forks a process for each line of JSON, and prints its exit code when it has ended."""
    for name in PRELOADED:
        importlib.import_module(name)
    triton_key()  # a hash of all of Triton, which is computed once in each process
    gc.freeze()  # programs collect garbage, and would visit and so copy all of these objects
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(_become(json.loads(line)))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
