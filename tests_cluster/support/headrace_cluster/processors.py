"""How long the processes of a service could not run because others used the processors."""

import os
import time
from bisect import bisect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .sampling import Sampling

# Samples between two searches for new threads.
LOOK_EVERY = 5
# Processes outside the pods: those on a client's way to them, and those that end them.
HOST_PROCESSES = "traefik", "kubelet", "containerd"


@dataclass(frozen=True, slots=True)
class Span:
    """The period between two times in Unix seconds."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass
class ProcessorWaits(Sampling):
    """Samples the threads of pods while its block runs.

    A machine with few processors makes every process slower, and a stream with it. The time that a
    thread waits for a processor is not a pause of the service.
    """

    INTERVAL_S = 0.2

    _times: list[float] = field(default_factory=list)
    _samples: list[dict[str, int]] = field(default_factory=list)
    _threads: list[Path] = field(default_factory=list)

    def own_seconds(self, span: Span) -> float:
        """The length of a period without the longest wait of a single thread for a processor."""
        first = max(0, bisect(self._times, span.began) - 1)
        last = min(len(self._times) - 1, bisect(self._times, span.ended))
        if first >= last:
            return span.seconds
        before, after = self._samples[first], self._samples[last]
        waited = max((after[each] - before[each] for each in after if each in before), default=0)
        share = waited / 1e9 / (self._times[last] - self._times[first])
        return span.seconds * max(0.0, 1 - share)

    def _sample(self) -> None:
        """The nanoseconds that each thread has waited so far; ended threads are left out."""
        if len(self._times) % LOOK_EVERY == 0:
            self._threads = list(_threads())
        found = {}
        for thread in self._threads:
            with suppress(OSError):
                found[thread.name] = int((thread / "schedstat").read_text().split()[1])
        self._samples.append(found)
        self._times.append(time.time())


def _threads() -> Iterator[Path]:
    """The folders of the threads on the path of a stream, including this process's."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            in_pod = "kubepods" in (process / "cgroup").read_text()
            name = (process / "comm").read_text().strip()
            if in_pod or name in HOST_PROCESSES or process.name == str(os.getpid()):
                yield from (process / "task").iterdir()
