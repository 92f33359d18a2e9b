"""Finds this machine's GPUs, usable cores and memory without importing torch."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_CPUINFO = Path("/proc/cpuinfo")


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names for CUDA_VISIBLE_DEVICES, one per GPU that a process started with `environ` sees."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        found = subprocess.run(  # noqa: S603
            query, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(found.stdout.split()) if found.returncode == 0 else ()


def usable_cores() -> int:
    """Cores this process may use: affinity and, in a container, the CPU quota (rounded up)."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = _cpu_quota()
    return max(1, min(cores, quota) if quota else cores)


def _cpu_quota() -> int | None:
    text = _read(_CGROUP / "cpu.max").split()
    if len(text) != 2 or text[0] == "max":
        return None
    return -(-int(text[0]) // int(text[1]))


def available_memory() -> int | None:
    """The bytes available to a new process, on the machine or within the container's limit."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(_MEMINFO), re.MULTILINE)
    free = [int(match[1]) * 1024] if match else []
    limit = _read(_CGROUP / "memory.max").strip()
    used = _read(_CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free.append(max(0, int(limit) - int(used)))
    return min(free, default=None)


def cpu_flags() -> frozenset[str]:
    """Instruction set flags by the kernel's names; empty if unknown."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", _read(_CPUINFO), re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
