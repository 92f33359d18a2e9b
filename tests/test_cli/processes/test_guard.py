"""Children die with their parent, even if the kernel has no parent-death signal."""

import subprocess
import sys

import pytest

from headrace_cli.processes import guard
from headrace_testing.pids import alive
from headrace_testing.processes import until

# Starts a guarded `sleep`, prints both pids and waits to be killed.
PARENT = """
import os, subprocess, sys
read, write = os.pipe()
os.set_inheritable(read, True)
guarded = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), str(read), "sleep", "1000"]
child = subprocess.Popen(guarded, pass_fds=[read])
os.close(read)
print(child.pid, flush=True)
child.wait()
print("ended", flush=True)
"""


@pytest.fixture(params=["linux", "elsewhere"])
def parent(request: pytest.FixtureRequest) -> list[str]:
    """A command whose guard works as on that platform."""
    program = PARENT
    if request.param == "elsewhere":
        disguise = "import runpy,sys;sys.platform='darwin';sys.argv=sys.argv[1:];"
        disguise += "runpy.run_path(sys.argv[0],run_name='__main__')"
        program = PARENT.replace('"-S", sys.argv[1]', f'"-S", "-c", {disguise!r}, sys.argv[1]')
    return [sys.executable, "-c", program, guard.__file__]


def test_a_guarded_program_dies_when_its_parent_is_killed(parent: list[str]) -> None:
    with subprocess.Popen(parent, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        until(lambda: b"sleep" in _command(pid), "the program to run")

        process.kill()
        process.wait()

        until(lambda: not alive(pid), "the program to be gone")


def test_a_guarded_program_can_end_by_itself(parent: list[str]) -> None:
    parent = [part.replace('"sleep", "1000"', '"true"') for part in parent]
    done = subprocess.run(parent, capture_output=True, text=True, timeout=60, check=True)

    # The output has ended, so the watcher is gone too.
    assert done.stdout.splitlines()[-1] == "ended"


def _command(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().split(b"\0")[0]
