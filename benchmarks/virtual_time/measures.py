"""The figures of a run: speed, latencies, waste and fairness, from the times of its tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from .jobs import Job

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""The weights of a prompt token and of an output token in fairness, as in the policy `fair`."""


@dataclass(slots=True)
class Log:
    """The record of a run. Times are in virtual seconds; slots are token positions."""

    jobs: Sequence[Job]
    tokens: dict[str, list[float]] = field(default_factory=dict)
    completed: set[str] = field(default_factory=set)
    shed: set[str] = field(default_factory=set)
    seconds: float = 0.0
    computed_slots: int = 0
    useful_slots: int = 0
    output_slots: int = 0
    reserved_seconds: float = 0.0
    used_seconds: float = 0.0
    preemptions: int = 0
    # Weighted tokens that each tenant got until the last request arrived.
    service: dict[str, float] = field(default_factory=dict)

    def token(self, name: str, at: float) -> None:
        self.tokens.setdefault(name, []).append(at)

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def output_waste(self) -> float:
        """The share of output slots that were reserved for sequences that had already ended."""
        return 1.0 - self.output_tokens / self.output_slots


def summary(log: Log) -> dict[str, float]:
    """Figures of a run; latencies in milliseconds, shares from 0 to 1.

    Latency is that of requests that completed, `kv_waste` unused slots over used ones.
    """
    known = {job.name: job for job in log.jobs}
    first = {name: times[0] - known[name].arrival for name, times in log.tokens.items()}
    gaps = np.concatenate([np.diff(times) for times in log.tokens.values()])
    ends = [log.tokens[name][-1] - known[name].arrival for name in log.completed]
    figures = {
        "requests": len(log.jobs),
        "seconds": log.seconds,
        "completed": len(log.completed) / len(log.jobs),
        "output_tokens_per_second": log.output_tokens / log.seconds,
        "requests_per_second": len(log.completed) / log.seconds,
        **percentiles("ttft_ms", list(first.values())),
        **percentiles("itl_ms", gaps),
        **percentiles("latency_ms", ends),
        "latency_mean_ms": 1000 * float(np.mean(ends)),
        "padding_share": 1.0 - log.useful_slots / log.computed_slots,
        "kv_waste": log.reserved_seconds / log.used_seconds - 1.0,
        "preemptions": log.preemptions,
        "fairness": jain(shares(log)),
    }
    urgent = [first[job.name] for job in log.jobs if job.priority < 0 and job.name in first]
    if urgent:
        figures |= percentiles("urgent_ttft_ms", urgent)
    timed = [job for job in log.jobs if isfinite(job.deadline)]
    if timed:
        met = sum(
            job.name in log.completed and log.tokens[job.name][-1] <= job.deadline for job in timed
        )
        figures |= {"deadlines_met": met / len(timed), "shed": len(log.shed) / len(timed)}
    return figures


def percentiles(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """The median and the 99th percentile in milliseconds, of values in seconds."""
    median, high = np.percentile(values, (50, 99)) if len(values) else (0.0, 0.0)
    return {f"{name}_p50": 1000 * float(median), f"{name}_p99": 1000 * float(high)}


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index: 1 if all values are equal, 1/n if one tenant has everything."""
    total = sum(values)
    return total * total / (len(values) * sum(value * value for value in values)) if total else 1.0


def shares(log: Log) -> list[float]:
    """Each tenant's service relative to its fair share, while requests arrived."""
    demands: dict[str, float] = {}
    for job in log.jobs:
        wanted = INPUT_WEIGHT * len(job.prompt) + OUTPUT_WEIGHT * job.output
        demands[job.tenant] = demands.get(job.tenant, 0.0) + wanted
    fair = max_min(demands, sum(log.service.values()))
    return [log.service.get(tenant, 0.0) / share for tenant, share in fair.items() if share]


def max_min(demands: Mapping[str, float], supply: float) -> dict[str, float]:
    """The max-min fair allocation: no tenant gets more than it asks for, and the rest is shared
    equally."""
    given: dict[str, float] = {}
    left = supply
    for count, (tenant, demand) in enumerate(sorted(demands.items(), key=lambda item: item[1])):
        given[tenant] = min(demand, left / (len(demands) - count))
        left -= given[tenant]
    return given
