"""Runs one part of gpu.py in a process of its own; ends it if it reports nothing for too long.

Python cannot interrupt a kernel that hangs, and a killed process may not end while the driver
waits. So no wait here is unbounded.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# This signal makes a part print its stack: parts register faulthandler for it.
WHERE = signal.SIGUSR1
POLL = 0.2
TOLD, THREAD = "most recent call first", re.compile("^(?:Current t|T)hread 0x.*$", re.MULTILINE)
# Time limits: until the stack trace begins, until it has ended, and until a killed process is gone.
TELL_SECONDS, STEADY_SECONDS, KILL_SECONDS = 3.0, 0.5, 10.0
FAILED, SILENT, LATE = "ended with", "said nothing for", "cut short after"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in seconds: of the whole run, and between two results or log lines."""

    seconds: float
    silence: float


def run_process(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    limits: Limits,
    count: Callable[[], int],
) -> str | None:
    """Runs the command and returns the problem, if any.

    `count` returns the number of results so far.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        problem = _watch(process, limits, lambda: (count(), log.stat().st_size))
        if problem is not None:
            _end(process, log)
    if problem is not None:
        return f"{problem}{_where(log)}"
    return None if process.returncode == 0 else f"{FAILED} {process.returncode}: {_tail(log)}"


def _watch(
    process: "subprocess.Popen[bytes]", limits: Limits, heard: Callable[[], object]
) -> str | None:
    """Waits for the process to end or a limit to pass; returns the limit, or None if the process
    ended."""
    begun = last = time.monotonic()
    seen = heard()
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL)
            return None
        now, found = time.monotonic(), heard()
        if found != seen:
            seen, last = found, now
        if now - begun > limits.seconds:
            return f"{LATE} {limits.seconds:.0f} s"
        if now - last > limits.silence:
            return f"{SILENT} {limits.silence:.0f} s"


def _end(process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Ends the process and those that it started, such as a compiler."""
    with suppress(ProcessLookupError):
        process.send_signal(WHERE)
        _listen(process, log)
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)


def _listen(process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Waits until the process has printed its stack, or for TELL_SECONDS."""
    asked = time.monotonic()
    size, since = -1, asked
    while process.poll() is None:
        now, text = time.monotonic(), log.read_bytes()
        if len(text) != size:
            size, since = len(text), now
        told = TOLD.encode() in text
        if now - since > STEADY_SECONDS if told else now - asked > TELL_SECONDS:
            return
        time.sleep(POLL / 4)


def _where(log: Path) -> str:
    """The last line of the log, followed by the innermost stack frames of the main thread, if
    faulthandler has printed them."""
    printed, *threads = THREAD.split(log.read_text(errors="replace"))
    last = printed.strip().rpartition("\n")[2][-250:]
    lines = map(str.strip, threads[-1].splitlines() if threads else [])
    places = [line for line in lines if line.startswith("File")]
    shown = [last, *([f"in {' < '.join(places[:3])}"[:400]] if places else [])]
    return "".join(f"; {one}" for one in shown if one)


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return " | ".join(lines[-4:])[-600:]
