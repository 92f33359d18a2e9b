import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.request import FinishReason
from headrace_engine.scheduler.stop_checker import Stop, StopRule

EOS = frozenset({0, 1})


def rule(params: SamplingParams, max_output: int = 100) -> StopRule:
    return StopRule.of(params, EOS, max_output)


@pytest.mark.parametrize("token", [0, 1])
def test_every_end_token_of_the_model_stops(token: int) -> None:
    assert rule(SamplingParams()).check(token, 1) == Stop(FinishReason.STOP)


def test_ignore_eos_continues_after_an_eos_token() -> None:
    assert rule(SamplingParams(ignore_eos=True)).check(0, 1) is None


def test_a_stop_token_is_named() -> None:
    params = SamplingParams(stop_token_ids=[5, 6])
    assert rule(params).check(6, 1) == Stop(FinishReason.STOP, 6)
    assert rule(params).check(7, 1) is None


def test_a_stop_token_counts_even_where_eos_is_ignored() -> None:
    params = SamplingParams(stop_token_ids=[0], ignore_eos=True)
    assert rule(params).check(0, 1) == Stop(FinishReason.STOP, 0)


def test_the_end_token_of_the_model_is_not_named_as_stop_token() -> None:
    assert rule(SamplingParams(stop_token_ids=[0])).check(0, 1) == Stop(FinishReason.STOP)


@pytest.mark.parametrize("token", [0, 5])
def test_nothing_stops_before_min_tokens(token: int) -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=[5])
    assert rule(params).check(token, 3) is None
    assert rule(params).check(token, 4) is not None


def test_max_tokens_ends_by_length() -> None:
    params = SamplingParams(max_tokens=2)
    assert rule(params).check(9, 1) is None
    assert rule(params).check(9, 2) == Stop(FinishReason.LENGTH)


def test_a_full_context_ends_by_length_for_any_max_tokens() -> None:
    assert rule(SamplingParams(max_tokens=None), 3).check(9, 3) == Stop(FinishReason.LENGTH)
    assert rule(SamplingParams(max_tokens=8), 3).check(9, 3) == Stop(FinishReason.LENGTH)
    assert rule(SamplingParams(max_tokens=None), 3).check(9, 2) is None


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    assert rule(SamplingParams(max_tokens=2)).check(0, 2) == Stop(FinishReason.STOP)
