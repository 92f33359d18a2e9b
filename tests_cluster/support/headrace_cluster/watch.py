"""Every change of a ModelService's pods, including ending ones, with its time."""

import json
import subprocess
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Self

from headrace_testing.processes import until

from .kubectl import Manifest
from .release import Service


@dataclass(frozen=True, slots=True)
class Change:
    """A change. `at` is in Unix seconds; `kind` is that of the API: ADDED, MODIFIED, DELETED."""

    at: float
    kind: str
    pod: Manifest

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def restarts(self) -> int:
        found = self.pod.get("status", {}).get("containerStatuses", ())
        return max((container["restartCount"] for container in found), default=0)

    @property
    def running(self) -> bool:
        found = self.pod.get("status", {}).get("containerStatuses", ())
        return any("running" in container.get("state", {}) for container in found)


@dataclass(slots=True)
class PodWatch:
    """Watches the engines' pods of a ModelService while its block runs."""

    service: Service
    changes: list[Change] = field(default_factory=list)
    _process: "subprocess.Popen[str] | None" = None
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        kubectl = ["kubectl", "--namespace", self.service.release.namespace, "get", "pods"]
        flags = ["--watch", "--output-watch-events", "-o", "json"]
        self._process = subprocess.Popen(
            [*kubectl, "--selector", self.service.selector, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._thread = threading.Thread(target=self._follow, args=(self._process.stdout,))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None and self._thread is not None
        self._process.terminate()
        self._thread.join()
        self._process.wait()

    def of(self, pod: str) -> list[Change]:
        return [change for change in list(self.changes) if change.name == pod]

    @property
    def restarts(self) -> int:
        """The most restarts of any container, including those of ending pods."""
        return max((change.restarts for change in list(self.changes)), default=0)

    def gone(self, pod: str) -> float | None:
        """The time at which a pod was gone, in Unix seconds."""
        return next((c.at for c in self.of(pod) if c.kind == "DELETED"), None)

    def told(self, pod: str) -> float | None:
        """The time at which a pod's deletion was requested."""
        told = (c.at for c in self.of(pod) if "deletionTimestamp" in c.pod["metadata"])
        return next(told, None)

    def until_gone(self, pod: str) -> float:
        until(lambda: self.gone(pod) is not None, f"{pod} to be gone", 240)
        gone = self.gone(pod)
        assert gone is not None
        return gone

    def _follow(self, output: IO[str]) -> None:
        with output:
            for line in output:
                event = json.loads(line)
                self.changes.append(Change(time.time(), event["type"], event["object"]))
