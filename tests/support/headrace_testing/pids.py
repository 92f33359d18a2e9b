"""Tells whether a process still runs, for tests of other processes' children."""

from pathlib import Path


def alive(pid: int) -> bool:
    """Whether the process runs; False once it has ended, even if its parent has not reaped it
    yet."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
