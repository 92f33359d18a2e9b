"""The result of a simulated run: objectives met, costs, number of changes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Seconds to the first token, and mean seconds per output token after it."""

    time_to_first_token: float = 2.0
    time_per_output_token: float = 0.06


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment of a run: counts of engines and requests, and requests admitted per second since
    the last sample."""

    at: float
    desired: int
    ready: int
    waiting: int
    running: int
    arrival_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """One policy's run. Requests that were refused or expired count as objectives missed; those of
    batches have no objectives. `longest_batch` is the seconds that the slowest batch took; None
    without batches."""

    name: str
    requests: int
    refused: int
    expired: int
    attainment: float
    time_to_first_token: dict[str, float]
    time_per_output_token: dict[str, float]
    gpu_hours: float
    scale_ups: int
    scale_downs: int
    most_engines: int
    longest_batch: float | None = None
    samples: tuple[Sample, ...]

    def summary(self) -> dict[str, Any]:
        """Everything but the samples, for a table or JSON."""
        names = [name for name in self.__dataclass_fields__ if name != "samples"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from the start of the trace, one per request; NaN if it did not get that far."""

    arrivals: NDArray[np.float64]
    outputs: NDArray[np.int64]
    first_tokens: NDArray[np.float64]
    ends: NDArray[np.float64]

    def to_first_token(self) -> NDArray[np.float64]:
        return self.first_tokens - self.arrivals

    def per_token(self) -> NDArray[np.float64]:
        """Mean seconds per output token after the first; 0 for a single token."""
        return (self.ends - self.first_tokens) / np.maximum(1, self.outputs - 1)

    def attainment(self, objectives: Objectives) -> float:
        """Share of all requests that met both objectives; a comparison with NaN is not met."""
        if not len(self.arrivals):
            return 1.0
        soon = self.to_first_token() <= objectives.time_to_first_token
        fast = self.per_token() <= objectives.time_per_output_token
        return float(np.mean(soon & fast))


def quantiles(values: NDArray[np.float64]) -> dict[str, float]:
    """p50, p95 and p99 without NaN; empty without values."""
    known = values[~np.isnan(values)]
    if not len(known):
        return {}
    found = np.quantile(known, [0.5, 0.95, 0.99])
    return {name: float(value) for name, value in zip(("p50", "p95", "p99"), found, strict=True)}
