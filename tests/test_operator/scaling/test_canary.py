"""When a canary is worse than the stable engines, and what both have served."""

from dataclasses import replace

import pytest

from headrace_common.protocol.variants import Agreement
from headrace_operator.scaling.canary import CanaryLimits, CanaryReason, compare
from headrace_operator.signals.canary_metrics import SideCounts, SideTotals, totals_of
from headrace_operator.signals.scrape import parse

LIMITS = CanaryLimits(min_requests=50, max_error_percent=5, max_latency_ratio=2)
GOOD = SideTotals(
    requests=100,
    errors=1,
    first_token_sum=10.0,
    first_token_count=100,
    output_token_sum=1.0,
    output_token_count=100,
)


@pytest.mark.parametrize(
    ("canary", "reason"),
    [
        (GOOD, CanaryReason.AS_GOOD),
        (replace(GOOD, requests=49), CanaryReason.COMPARING),
        (replace(GOOD, errors=6), CanaryReason.AS_GOOD),
        (replace(GOOD, errors=7), CanaryReason.ERRORS),
        (replace(GOOD, first_token_sum=20.0), CanaryReason.AS_GOOD),
        (replace(GOOD, first_token_sum=21.0), CanaryReason.FIRST_TOKEN),
        (replace(GOOD, output_token_sum=2.1), CanaryReason.OUTPUT_TOKEN),
        (replace(GOOD, first_token_count=0, first_token_sum=0.0), CanaryReason.AS_GOOD),
    ],
)
def test_a_canary_is_worse_if_it_fails_more_or_is_slower(
    canary: SideTotals, reason: CanaryReason
) -> None:
    verdict = compare(GOOD, canary, LIMITS)

    assert verdict.reason is reason
    assert verdict.worse == (reason not in (CanaryReason.AS_GOOD, CanaryReason.COMPARING))


def test_two_failures_of_a_canary_may_be_chance() -> None:
    canary = replace(GOOD, requests=50, errors=2)
    lenient = replace(LIMITS, max_error_percent=1)

    assert compare(replace(GOOD, errors=0), canary, lenient).reason is CanaryReason.AS_GOOD
    more = replace(canary, errors=3)
    assert compare(replace(GOOD, errors=0), more, lenient).reason is CanaryReason.ERRORS


@pytest.mark.parametrize(
    ("agreement", "reason"),
    [
        (Agreement(equal=9), CanaryReason.COMPARING),
        (Agreement(equal=9, different=1), CanaryReason.AS_GOOD),
        (Agreement(equal=89, different=11), CanaryReason.ANSWERS),
    ],
)
def test_a_canary_is_worse_if_too_few_answers_are_equal(
    agreement: Agreement, reason: CanaryReason
) -> None:
    limits = replace(LIMITS, min_agreement_percent=90.0, min_comparisons=10)

    verdict = compare(GOOD, GOOD, limits, agreement)

    assert verdict.reason is reason
    assert verdict.worse == (reason is CanaryReason.ANSWERS)
    assert f"{agreement.equal} of {agreement.compared} compared answers" in verdict.message
    few = replace(GOOD, requests=1)
    early = compare(few, few, limits, agreement)
    assert early.worse == verdict.worse, "different answers are reason enough"
    assert compare(GOOD, GOOD, LIMITS, agreement).reason is CanaryReason.AS_GOOD, "not asked for"


def test_what_pods_served_before_the_canary_or_a_restart_is_not_counted_twice() -> None:
    counts = SideCounts()
    counts.add({"a": SideTotals(requests=1000, errors=500)})
    assert counts.total == SideTotals()

    counts.add({"a": SideTotals(requests=1010, errors=501), "b": SideTotals(requests=7)})
    counts.add({"b": SideTotals(requests=9)})
    counts.add({"a": SideTotals(requests=4, errors=1), "b": SideTotals(requests=9)})

    assert counts.total == SideTotals(requests=10 + 2 + 4, errors=1 + 1)


def test_totals_are_read_from_an_engines_page() -> None:
    own = 'gen_ai_request_model="qwen",variant="canary"'
    page = f"""# TYPE headrace_engine_requests_ended counter
headrace_engine_requests_ended_total{{{own},error_type=""}} 5
headrace_engine_requests_ended_total{{{own},error_type="internal_error"}} 2
headrace_engine_requests_ended_total{{{own},error_type="cancelled"}} 50
headrace_engine_requests_ended_total{{gen_ai_request_model="other",error_type=""}} 99
# TYPE headrace_engine_time_to_first_token_seconds histogram
headrace_engine_time_to_first_token_seconds_bucket{{{own},le="+Inf"}} 6
headrace_engine_time_to_first_token_seconds_count{{{own}}} 6
headrace_engine_time_to_first_token_seconds_sum{{{own}}} 1.5
# TYPE headrace_engine_time_per_output_token_seconds histogram
headrace_engine_time_per_output_token_seconds_bucket{{{own},le="+Inf"}} 4
headrace_engine_time_per_output_token_seconds_count{{{own}}} 4
headrace_engine_time_per_output_token_seconds_sum{{{own}}} 0.2
"""
    found = totals_of(parse(page, "qwen"))

    assert (found.requests, found.errors) == (7, 2)
    assert (found.first_token, found.output_token) == (0.25, 0.05)
