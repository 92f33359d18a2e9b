"""While sequences decode, a step takes only as many prompt tokens as its target time allows."""

from dataclasses import replace
from math import inf

import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.step_cost import PrefillDecodeCosts
from headrace_engine.scheduler.prefill_budget import LEAST_TOKENS, PrefillBudget
from headrace_testing.engine import make_config, make_request, make_rig


def budget(target: float, *, decode_s: float = 0.0, token_s: float = 0.0) -> PrefillBudget:
    return PrefillBudget(target, learned(decode_s=decode_s, token_s=token_s))


def learned(*, decode_s: float = 0.0, token_s: float = 0.0) -> PrefillDecodeCosts:
    costs = PrefillDecodeCosts()
    if decode_s:
        costs.observe(8, 0, decode_s)
    if token_s:
        costs.observe(8, 1000, decode_s + 1000 * token_s)
    return costs


def test_prompt_tokens_get_the_time_that_decodes_leave_of_the_target() -> None:
    prefill_budget = budget(0.1, decode_s=0.02, token_s=0.0001)

    assert prefill_budget.prompt_tokens(2048, 8) == pytest.approx(800, abs=1)


def test_the_budget_of_tokens_is_never_exceeded() -> None:
    assert budget(0.1, decode_s=0.02, token_s=0.0001).prompt_tokens(256, 8) == 256


def test_prompts_progress_even_if_decodes_alone_exceed_the_target() -> None:
    assert budget(0.1, decode_s=0.5, token_s=0.0001).prompt_tokens(2048, 8) == LEAST_TOKENS


@pytest.mark.parametrize("prefill_budget", [budget(inf, decode_s=0.02, token_s=1.0), budget(0.1)])
def test_without_a_target_or_a_timed_prompt_prompts_are_not_limited(
    prefill_budget: PrefillBudget,
) -> None:
    assert prefill_budget.prompt_tokens(2048, 8) == 2048


def test_without_decodes_prompts_are_not_limited() -> None:
    assert budget(0.1, decode_s=0.02, token_s=1.0).prompt_tokens(2048, 0) == 2048


def test_steps_without_a_measured_time_do_not_change_the_estimate() -> None:
    costs = learned(decode_s=0.02, token_s=0.0001)
    prefill_budget = PrefillBudget(0.1, costs)
    before = prefill_budget.prompt_tokens(2048, 8)

    for _ in range(100):
        costs.observe(8, 100, 0.0)

    assert prefill_budget.prompt_tokens(2048, 8) == before


def test_the_budget_adapts_to_a_machine_that_becomes_slower() -> None:
    costs = learned(token_s=0.0001)
    prefill_budget = PrefillBudget(0.1, costs)
    for _ in range(50):
        costs.observe(0, 500, 500 * 0.0002)

    assert prefill_budget.prompt_tokens(2048, 8) == pytest.approx(500, rel=0.05)


def test_a_scheduler_cuts_prompts_to_the_target_only_while_something_decodes() -> None:
    """A step takes 0.1 s, and 1 ms more for each prompt token."""
    config = replace(make_config(max_num_batched_tokens=1000), itl_target=0.1)
    rig = make_rig(config, num_blocks=256, max_model_len=512, prompt_seconds=0.001)
    long_output = SamplingParams(max_tokens=50, ignore_eos=True)
    rig.add(make_request("first", [1] * 300, params=long_output))
    rig.step()
    rig.add(make_request("second", [2] * 300))
    rig.step(3)

    runs = [
        [(run.sequence.request.request_id, run.length) for run in step.scheduled]
        for step in rig.runner.steps
    ]

    assert runs == [[("first", 300)], *[[("first", 1), ("second", 100)]] * 3]
