"""Whether a process still runs, for tests that look after other processes' children."""

from pathlib import Path


def alive(pid: int) -> bool:
    """False for one that has ended, be it reaped by its new parent or not yet."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
