"""What the engines of each side of a canary have served, from their metrics pages."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from headrace_common.errors import FailureCode
from headrace_common.observability import metric_names as metrics

from .signals import Samples

ENDED = metrics.ENGINE_REQUESTS_ENDED.prometheus_name
FIRST_TOKEN = metrics.ENGINE_TIME_TO_FIRST_TOKEN.prometheus_name
OUTPUT_TOKEN = metrics.ENGINE_TIME_PER_OUTPUT_TOKEN.prometheus_name
# Failures that say nothing about the engine that notes them: those requests are not counted.
_NO_FAULT = {FailureCode.CANCELLED, FailureCode.ABANDONED, FailureCode.LOST}
SAMPLE_NAMES = frozenset(
    {
        ENDED,
        *(f"{name}_{part}" for name in (FIRST_TOKEN, OUTPUT_TOKEN) for part in ("sum", "count")),
    }
)
"""The metrics that are read from a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideTotals:
    """Ended and failed requests, and sums and numbers of latencies in seconds."""

    requests: float = 0.0
    errors: float = 0.0
    first_token_sum: float = 0.0
    first_token_count: float = 0.0
    output_token_sum: float = 0.0
    output_token_count: float = 0.0

    @property
    def error_rate(self) -> float:
        return self.errors / self.requests if self.requests else 0.0

    @property
    def first_token(self) -> float | None:
        """The mean time to the first token; None without one."""
        return _mean(self.first_token_sum, self.first_token_count)

    @property
    def output_token(self) -> float | None:
        """The mean time per output token; None without one."""
        return _mean(self.output_token_sum, self.output_token_count)

    def plus(self, other: "SideTotals") -> "SideTotals":
        return SideTotals(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})

    def since(self, before: "SideTotals") -> "SideTotals":
        """What was added since `before`, of the same pod; all of it if its engine has restarted."""
        if self.requests < before.requests or self.first_token_count < before.first_token_count:
            return self
        return SideTotals(**{name: getattr(self, name) - getattr(before, name) for name in _NAMES})


_NAMES = tuple(field.name for field in fields(SideTotals))


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None


def totals_of(page: Samples) -> SideTotals:
    """The totals of one engine since its start."""
    ended = [
        (labels.get("error_type", ""), value)
        for labels, value in page.get(ENDED, ())
        if labels.get("error_type") not in _NO_FAULT
    ]
    return SideTotals(
        requests=sum(value for _, value in ended),
        errors=sum(value for error, value in ended if error),
        first_token_sum=_sum(page, f"{FIRST_TOKEN}_sum"),
        first_token_count=_sum(page, f"{FIRST_TOKEN}_count"),
        output_token_sum=_sum(page, f"{OUTPUT_TOKEN}_sum"),
        output_token_count=_sum(page, f"{OUTPUT_TOKEN}_count"),
    )


def _sum(page: Samples, name: str) -> float:
    return sum(value for _, value in page.get(name, ()))


class SideCounts:
    """Adds up what the pods of one side have served since they were first seen."""

    def __init__(self) -> None:
        self._last: dict[str, SideTotals] = {}
        self.total = SideTotals()

    def add(self, pages: Mapping[str, SideTotals]) -> None:
        """Adds a reading, by pod. Those that were not read are added when they are read again."""
        for pod, now in pages.items():
            before = self._last.get(pod)
            if before is not None:
                self.total = self.total.plus(now.since(before))
            self._last[pod] = now
