"""Decides whether a canary is worse than the stable engines: one pure function."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from headrace_common.protocol.variants import Agreement

FEWEST_ERRORS = 3  # failed requests of the canary; fewer may be chance


_NO_ANSWERS = Agreement()


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
    ANSWERS = "CanaryAnswersDiffer"
    OUTPUT_TOKEN = "CanarySlowPerOutputToken"  # noqa: S105
    PROMOTED = "CanaryPromoted"
    BROKEN = "CanaryDoesNotRun"


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryLimits:
    """How much worse than the stable engines a canary may be.

    Both sides must have ended `min_requests`. The share of failed requests may be larger by
    `max_error_percent` points, mean latencies `max_latency_ratio` times as long. With
    `min_agreement_percent` at least this percentage of the compared answers must be equal, once
    there are `min_comparisons`.
    """

    min_requests: int
    max_error_percent: float
    max_latency_ratio: float
    min_agreement_percent: float | None = None
    min_comparisons: int = 1


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """`worse` asks for a rollback."""

    reason: CanaryReason
    message: str
    worse: bool = False


def compare(
    stable: Served, canary: Served, limits: CanaryLimits, agreement: Agreement = _NO_ANSWERS
) -> CanaryVerdict:
    """Compares what both sides have served since the canary was first seen. `agreement` is of
    answers to the same requests."""
    served = _compare_service(stable, canary, limits)
    if served.worse or limits.min_agreement_percent is None:
        return served
    answers = _compare_answers(agreement, limits.min_agreement_percent, limits.min_comparisons)
    if answers.worse or served.reason is CanaryReason.AS_GOOD:
        return replace(answers, message=f"{served.message}; {answers.message}")
    return replace(served, message=f"{served.message}; {answers.message}")


def _compare_answers(agreement: Agreement, least_percent: float, least: int) -> CanaryVerdict:
    text = f"{agreement.equal} of {agreement.compared} compared answers are equal"
    if agreement.compared < least:
        return CanaryVerdict(CanaryReason.COMPARING, f"{text}, {least} are needed")
    if 100 * agreement.equal < least_percent * agreement.compared:
        return CanaryVerdict(CanaryReason.ANSWERS, f"{text}, fewer than {least_percent:g}%", True)
    return CanaryVerdict(CanaryReason.AS_GOOD, text)


def _compare_service(stable: Served, canary: Served, limits: CanaryLimits) -> CanaryVerdict:
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
