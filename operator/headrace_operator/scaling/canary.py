"""Decides whether a canary is worse than the stable engines: one pure function."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

FEWEST_ERRORS = 3  # failed requests of the canary; fewer may be chance


class Served(Protocol):
    """What the engines of one side have served."""

    @property
    def requests(self) -> float: ...
    @property
    def errors(self) -> float: ...
    @property
    def error_rate(self) -> float: ...
    @property
    def first_token(self) -> float | None: ...
    @property
    def output_token(self) -> float | None: ...


class CanaryReason(StrEnum):
    COMPARING = "Comparing"
    AS_GOOD = "AsGoodAsStable"
    ERRORS = "CanaryFailsRequests"
    FIRST_TOKEN = "CanarySlowToFirstToken"  # noqa: S105 - not a secret
    OUTPUT_TOKEN = "CanarySlowPerOutputToken"  # noqa: S105
    BROKEN = "CanaryDoesNotRun"


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryLimits:
    """How much worse than the stable engines a canary may be.

    Both sides must have ended `min_requests`. The share of failed requests may be larger by
    `max_error_percent` points, mean latencies `max_latency_ratio` times as long.
    """

    min_requests: int
    max_error_percent: float
    max_latency_ratio: float


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """`worse` asks for a rollback."""

    reason: CanaryReason
    message: str
    worse: bool = False


def compare(stable: Served, canary: Served, limits: CanaryLimits) -> CanaryVerdict:
    """Compares what both sides have served since the canary was first seen."""
    least = min(stable.requests, canary.requests)
    figures = (
        f"{canary.requests:.0f} requests of the canary, {stable.requests:.0f} of stable engines"
    )
    if least < limits.min_requests:
        text = f"the canary: {figures} have ended; {limits.min_requests} of each are needed"
        return CanaryVerdict(CanaryReason.COMPARING, text)
    more = 100 * (canary.error_rate - stable.error_rate)
    if canary.errors >= FEWEST_ERRORS and more > limits.max_error_percent:
        text = f"{canary.error_rate:.1%} of its requests fail, of others {stable.error_rate:.1%}"
        return CanaryVerdict(CanaryReason.ERRORS, f"the canary: {text} ({figures})", worse=True)
    for reason, name, own, other in (
        (CanaryReason.FIRST_TOKEN, "first token", canary.first_token, stable.first_token),
        (CanaryReason.OUTPUT_TOKEN, "output token", canary.output_token, stable.output_token),
    ):
        if own is not None and other and own > limits.max_latency_ratio * other:
            text = f"{own * 1000:.0f} ms per {name} instead of {other * 1000:.0f} ms"
            return CanaryVerdict(reason, f"the canary takes {text} ({figures})", worse=True)
    return CanaryVerdict(
        CanaryReason.AS_GOOD, f"the canary is as good as stable engines ({figures})"
    )
