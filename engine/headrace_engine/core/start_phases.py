"""The phases of an engine's start, and how long each took.

Imports only the standard library, since it is used before torch is imported.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

# In their order. A phase without work is left out, and one may be entered again.
PHASES = (
    "process",  # until the first line of the program
    "imports",
    "settings",
    "tokenizer",
    "turn",  # waits until a shared accelerator is free
    "nodes",  # waits until the other nodes have joined
    "device",  # config.json, the device, attention backend and operators
    "weights",  # read and put into their places
    "kernels",  # compiled or loaded, and measured
    "kv_cache",  # a profile run and the allocation
    "warm_up",
    "cuda_graphs",
    "grammars",
    "telemetry",
    "connection",  # to the queue
    "registration",
    "adapters",
    "first_beat",
)

# Is told each phase as it begins.
OnPhase = Callable[[str], object]


def ignore_phase(phase: str) -> None:
    """An OnPhase that does nothing."""


class StartPhases:
    """Divides the time from the process's start until the engine is ready into phases.

    A phase lasts until the next one begins, so that their sum is the whole time. `age` is the age
    of the process in seconds.
    """

    def __init__(self, age: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = self._since = clock() - age
        self._seconds: dict[str, float] = {}
        self.current: str | None = PHASES[0]

    def begin(self, phase: str) -> None:
        """Ends the current phase and begins this one.

        Does nothing once the start has ended: an engine that wakes up may load its model again.
        """
        if self.current is None:
            return
        self._close()
        self.current = phase

    def end(self) -> None:
        """Ends the last phase: the engine is ready."""
        self._close()
        self.current = None

    def _close(self) -> None:
        now = self._clock()
        if self.current is not None:
            spent = self._seconds.get(self.current, 0.0) + now - self._since
            self._seconds = {**self._seconds, self.current: spent}
        self._since = now

    @property
    def seconds(self) -> Mapping[str, float]:
        """The seconds of each phase that has ended. Callable from any thread."""
        return self._seconds

    @property
    def age(self) -> float:
        """Seconds since the process's start. Callable from any thread."""
        return self._clock() - self._begun

    def summary(self) -> dict[str, object]:
        """The fields of a log line: the seconds until the last phase ended, and of each phase."""
        phases = {phase: round(seconds, 3) for phase, seconds in self._seconds.items()}
        return {"seconds": round(self._since - self._begun, 3), "phases": phases}


def process_age() -> float:
    """Seconds since the kernel started this process, to a hundredth; 0 without Linux's /proc."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0
