"""Compiles all packages of the environment of the Python that runs this to bytecode, on all cores:

    .venv/bin/python requirements/compile_packages.py [PID]

uv leaves that to the first import. With the id of a process, it works only while that process runs,
and only when no other program needs the processors. Uses only the standard library.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from compileall import compile_file
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

CHUNK = 32


def main(arguments: Sequence[str], environment: Path = Path(sys.prefix)) -> int:
    """Returns the exit status: 1 where the process ended before all was compiled."""
    done = environment / ".compiled"
    if done.exists():
        return 0
    going_on: Callable[[], bool] = lambda: True  # noqa: E731
    if arguments:
        yield_to_others()
        going_on = partial(runs, int(arguments[0]))
    if not compile_all(sorted(environment.glob("lib/python*/**/*.py")), going_on):
        return 1
    done.touch()
    return 0


def compile_all(files: Iterable[Path], going_on: Callable[[], bool]) -> bool:
    """Whether it came to the end. What does not compile is left to its import."""
    compile_one = partial(compile_file, quiet=2)
    with ProcessPoolExecutor() as pool:
        for _ in pool.map(compile_one, files, chunksize=CHUNK):
            if not going_on():
                pool.shutdown(cancel_futures=True)
                return False
    return True


def yield_to_others() -> None:
    """Takes the lowest priority that the system has, for this process and those that it starts."""
    os.nice(19)
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another package's
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
