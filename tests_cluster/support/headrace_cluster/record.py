"""Load and engines over time, sampled while a test runs, and plotted."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from matplotlib.figure import Figure

from headrace_common.observability import metric_names
from headrace_testing.prometheus import PrometheusServer

from .load import Load
from .release import Service
from .sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sample. `at` is in seconds since the beginning; the rest are counts."""

    at: float
    in_flight: int
    backlog: int
    desired: int
    ready: int


@dataclass
class Recorder(Sampling):
    """Reads a ModelService's status and the queue's length once a second while its block runs, from
    `began`, Unix time. The status tells the queue's length too, but as it was when the operator
    last looked, up to 15 s before."""

    INTERVAL_S = 1.0

    service: Service
    prometheus: PrometheusServer
    began: float = field(default_factory=time.time)
    samples: list[Sample] = field(default_factory=list)
    _loads: list[Load] = field(default_factory=list)

    def watch(self, load: Load) -> None:
        """Also counts the requests of the load."""
        self._loads.append(load)

    @property
    def last(self) -> Sample:
        return self.samples[-1]

    def most(self, what: Literal["desired", "ready", "backlog"]) -> int:
        return max((getattr(sample, what) for sample in self.samples), default=0)

    def _sample(self) -> None:
        status = self.service.status
        self.samples.append(
            Sample(
                at=time.time() - self.began,
                in_flight=sum(load.in_flight() for load in self._loads),
                backlog=self._waiting(),
                desired=status.get("desiredReplicas", 0),
                ready=status.get("readyReplicas", 0),
            )
        )

    def _waiting(self) -> int:
        found = self.prometheus.query(f"max({metric_names.QUEUE_DEPTH.prometheus_name})")
        return int(float(found[0]["value"][1])) if found else 0


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Plots requests above and engines below, over one axis of time."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    requests, engines = figure.subplots(2, 1, sharex=True)
    times = [sample.at for sample in samples]
    requests.fill_between(times, [s.in_flight for s in samples], step="post", alpha=0.25,
                          label="in flight, as the clients see it")  # fmt: skip
    requests.step(times, [s.backlog for s in samples], where="post", color="C3", label="waiting")
    requests.set_ylabel("requests")
    engines.step(times, [s.desired for s in samples], where="post", color="C1", label="desired")
    engines.fill_between(times, [s.ready for s in samples], step="post", alpha=0.35, color="C2",
                         label="ready")  # fmt: skip
    engines.set_ylabel("engines")
    engines.set_xlabel("seconds")
    engines.yaxis.get_major_locator().set_params(integer=True)
    for axes in (requests, engines):
        axes.legend(loc="upper right", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
