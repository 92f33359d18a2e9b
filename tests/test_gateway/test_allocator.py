"""The memory of large requests is returned to the system."""

import subprocess
import sys

import pytest

# The first block, once freed, has glibc keep everything up to twice its size.
PROGRAM = """
import os, sys
from headrace_gateway.limits.allocator import give_back_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20

if sys.argv[1] == "set":
    give_back_memory()
before = resident()
block = b"x" * (24 << 20)
del block
blocks = [b"x" * (1 << 20) for _ in range(20)]
del blocks
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize("given", ["set", "as it is"])
def test_freed_memory_is_given_back(given: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given], capture_output=True, text=True, check=True
    )

    assert (int(done.stdout) < 10) == (given == "set")
