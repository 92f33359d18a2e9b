"""The memory of large requests is returned to the system."""

import subprocess
import sys

import pytest

# After the first block is freed, glibc keeps freed memory of up to twice its size, unless
# give_back_memory was called.
PROGRAM = """
import os, sys
from headrace_gateway.limits.allocator import give_back_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20

if sys.argv[1] == "set up":
    give_back_memory()
before = resident()
block = b"x" * (24 << 20)
del block
blocks = [b"x" * (1 << 20) for _ in range(20)]
del blocks
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize("allocator", ["set up", "default"])
def test_freed_memory_is_given_back_once_the_allocator_is_set_up(allocator: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, allocator], capture_output=True, text=True, check=True
    )

    assert (int(done.stdout) < 10) == (allocator == "set up")
