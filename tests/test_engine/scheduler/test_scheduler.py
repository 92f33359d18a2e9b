"""The scheduler step by step. The fake runner checks blocks and KV in each step of these tests."""

import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.errors import RequestError
from headrace_engine.core.request import FinishReason, State
from headrace_engine.core.step_plan import StepResult
from headrace_testing.engine import Rig, make_config, make_request, make_rig


def params(max_tokens: int | None = 4, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)


def test_decodes_come_first_and_prefill_chunks_fill_the_budget() -> None:
    rig = make_rig(make_config(max_num_batched_tokens=8))
    rig.add(make_request("a", range(1, 4)))
    rig.step()
    rig.add(make_request("b", range(10, 22)))
    rig.step()
    assert rig.shape() == [("a", 3, 1), ("b", 0, 7)]
    rig.step()
    assert rig.shape() == [("a", 4, 1), ("b", 7, 5)]
    rig.step()
    assert rig.shape() == [("a", 5, 1), ("b", 12, 1)]
    stats = rig.scheduler.stats()
    assert (stats.step_prefill_tokens, stats.step_decode_tokens) == (0, 2)


def test_one_step_prefills_several_sequences() -> None:
    rig = make_rig(make_config(max_num_batched_tokens=10))
    rig.add(*(make_request(name, [k] * 4) for k, name in enumerate("abc", 1)))
    rig.step()
    assert rig.shape() == [("a", 0, 4), ("b", 0, 4), ("c", 0, 2)]
    assert rig.scheduler.stats().step_prefill_tokens == 10


def test_a_token_is_sampled_only_when_all_known_ones_are_computed() -> None:
    rig = make_rig(make_config(max_num_batched_tokens=4))
    rig.add(make_request("a", range(1, 11)))
    rig.step(2)
    assert rig.outputs == []
    rig.step()
    assert [(out.index, len(out.token_ids)) for out in rig.outputs] == [(0, 1)]


def test_the_earlier_arrival_runs_first_in_any_order_of_addition() -> None:
    rig = make_rig(make_config(max_num_seqs=1))
    rig.add(make_request("late", [1, 2], arrival=2.0), make_request("early", [3, 4], arrival=1.0))
    rig.step()
    assert rig.shape() == [("early", 0, 2)]


def test_no_more_than_max_num_seqs_run() -> None:
    rig = make_rig(make_config(max_num_seqs=2))
    requests = [make_request(name, [k, k]) for k, name in enumerate("abc", 1)]
    rig.add(*requests)
    rig.step()
    stats = rig.scheduler.stats()
    assert (stats.running, stats.waiting) == (2, 1)
    rig.finish()
    assert rig.tokens() == rig.expected(*requests)


def test_starting_sequences_leave_the_watermark_free() -> None:
    rig = make_rig(make_config(watermark=0.25), num_blocks=8)
    rig.add(make_request("a", [1] * 12), make_request("b", [2] * 13), make_request("c", [3]))
    rig.step()
    assert [name for name, _, _ in rig.shape()] == ["a"], "b takes 4 of 5 and c comes after it"


def test_a_prefill_gets_all_its_blocks_before_others_start() -> None:
    rig = make_rig(make_config(max_num_batched_tokens=8), num_blocks=8)
    rig.add(make_request("a", range(1, 25)), make_request("b", range(25, 35)))
    rig.step(4)
    assert rig.scheduler.stats().preemptions == 0
    assert rig.shape() == [("a", 24, 1)]


def test_at_most_as_many_sequences_run_as_the_budget_has_tokens() -> None:
    rig = make_rig(make_config(max_num_seqs=8, max_num_batched_tokens=2))
    requests = [make_request(name, [k]) for k, name in enumerate("abc", 1)]
    rig.add(*requests)
    rig.step(2)
    assert rig.scheduler.stats().running == 2
    rig.finish()
    assert rig.tokens() == rig.expected(*requests)


def test_a_lone_sequence_may_fill_the_whole_pool() -> None:
    rig = make_rig(make_config(watermark=0.9), num_blocks=4)
    request = make_request("a", [1] * 8, params=params(8))
    rig.add(request)
    rig.finish()
    assert rig.tokens() == rig.expected(request)
    assert rig.scheduler.stats().blocks_used == 0


def test_without_max_tokens_a_sequence_ends_when_the_pool_is_full() -> None:
    rig = make_rig(num_blocks=4)
    rig.add(make_request("a", [1] * 8, params=params(None)))
    rig.finish()
    assert rig.outputs[-1].finish_reason is FinishReason.LENGTH
    assert len(rig.tokens()["a", 0]) == 8


def test_the_latest_arrival_is_preempted_and_resumes_before_newer_ones() -> None:
    rig = make_rig(make_config(max_num_seqs=2), num_blocks=6)
    requests = [make_request(name, [k] * 8, params=params(9)) for k, name in enumerate("abc", 1)]
    rig.add(*requests)
    rig.step(6)
    (victim,) = {i.sequence for i in rig.runner.steps[0].scheduled} - set(rig.scheduler.running())
    assert victim.request.request_id == "b"
    assert victim.state is State.PREEMPTED
    assert (victim.block_table, victim.num_computed_tokens) == ([], 0)
    assert rig.scheduler.stats().preemptions == 1
    rig.finish()
    stats = rig.scheduler.stats()
    assert stats.prefix_hit_tokens + stats.prefix_miss_tokens == 24, "prompts count once"
    first_runs = [out.request_id for out in rig.outputs if out.index == 8]
    assert first_runs == ["a", "b", "c"]
    assert rig.tokens() == rig.expected(*requests)


def test_a_preempted_sequence_recomputes_without_sampling_again() -> None:
    rig = make_rig(make_config(enable_prefix_caching=False), num_blocks=5)
    requests = [make_request(name, [k] * 8, params=params(8)) for k, name in enumerate("ab", 1)]
    rig.add(*requests)
    rig.finish()
    assert rig.scheduler.stats().preemptions > 0
    from_start = [
        item.length
        for scheduler_output in rig.runner.steps
        for item in scheduler_output.scheduled
        if item.sequence.request.request_id == "b" and item.start == 0
    ]
    assert from_start[0] == 8
    assert from_start[1] > 8, "prompt and output in one run"
    assert [out.index for out in rig.outputs if out.request_id == "b"] == list(range(8))
    assert rig.tokens() == rig.expected(*requests)


def test_an_earlier_prefill_takes_blocks_from_later_decodes() -> None:
    rig = make_rig(make_config(max_num_batched_tokens=3), num_blocks=8)
    late = make_request("late", range(30, 41), params=params(20), arrival=9.0)
    early = make_request("early", range(1, 21), params=params(4), arrival=1.0)
    rig.add(late)
    rig.step(4)
    rig.add(early)
    while not any(out.request_id == "early" for out in rig.outputs):
        rig.step()
        assert "early" in [name for name, _, _ in rig.shape()], "it waits for a later one"
    assert rig.scheduler.stats().preemptions == 1
    rig.finish()
    assert rig.tokens() == rig.expected(late, early)


def test_a_later_prefill_without_blocks_keeps_its_computed_blocks() -> None:
    rig = make_rig(make_config(max_num_batched_tokens=3), num_blocks=8)
    early = make_request("early", range(30, 41), params=params(20), arrival=1.0)
    late = make_request("late", range(1, 21), params=params(4), arrival=9.0)
    rig.add(early)
    rig.step(4)
    rig.add(late)
    rig.step(7)
    assert rig.shape() == [("early", 17, 1)]
    stats = rig.scheduler.stats()
    assert (stats.running, stats.blocks_used, stats.preemptions) == (2, 8, 0)
    rig.finish()
    assert rig.tokens() == rig.expected(early, late)


def test_the_budget_goes_to_the_earlier_prefill_first() -> None:
    rig = make_rig(make_config(max_num_batched_tokens=16))
    resume = ((5,) * 10, (6,) * 10)
    rig.add(make_request("a", [1, 2, 3, 4], params=params(20, n=2), resume=resume))
    rig.add(make_request("b", range(20, 39), arrival=1.0))
    rig.step()
    assert rig.shape() == [("a", 0, 14), ("b", 0, 2)]
    rig.step()
    assert rig.shape() == [("a", 14, 1), ("a", 4, 10), ("b", 2, 5)]


def test_each_choice_reports_the_cached_tokens_of_the_prompt() -> None:
    rig = make_rig()
    rig.add(make_request("a", range(1, 14)))
    rig.finish()
    rig.outputs.clear()
    rig.add(make_request("b", range(1, 14), params=params(n=2)))
    rig.finish()
    assert {(out.choice, out.cached_tokens) for out in rig.outputs} == {(0, 12), (1, 12)}


def test_a_prompt_is_served_from_the_prefix_cache() -> None:
    rig = make_rig()
    rig.add(make_request("a", range(1, 14)))
    rig.finish()
    rig.add(make_request("b", [*range(1, 13), 40]))
    rig.step()
    assert rig.shape() == [("b", 12, 1)]
    assert rig.outputs[-1].cached_tokens == 12
    stats = rig.scheduler.stats()
    assert (stats.prefix_hit_tokens, stats.prefix_miss_tokens) == (12, 14)


def test_another_salt_is_not_served_from_the_cache() -> None:
    rig = make_rig()
    rig.add(make_request("a", range(1, 14), cache_salt=b"one"))
    rig.finish()
    rig.add(make_request("b", range(1, 14), cache_salt=b"two"))
    rig.step()
    assert rig.shape() == [("b", 0, 13)]


def test_output_tokens_are_found_by_the_next_turn_of_a_conversation() -> None:
    rig = make_rig()
    rig.add(make_request("a", range(1, 9), params=params(9)))
    rig.finish()
    turn = [*range(1, 9), *rig.tokens()["a", 0], 5]
    rig.add(make_request("b", turn))
    rig.step()
    assert rig.shape() == [("b", 16, 2)]


@pytest.mark.parametrize("length", [5, 8])
def test_choices_share_the_prompt_and_run_only_its_last_token(length: int) -> None:
    rig = make_rig()
    request = make_request("a", range(1, length + 1), params=params(6, n=3))
    rig.add(request)
    rig.step()
    assert rig.shape() == [("a", 0, length)]
    rig.step()
    runs = sorted((i.sequence.choice, i.start, i.length) for i in rig.runner.steps[-1].scheduled)
    assert runs == [(0, length, 1), (1, length - 1, 1), (2, length - 1, 1)]
    assert len(rig.runner.steps[-1].copies) == 2
    rig.finish()
    assert rig.tokens() == rig.expected(request)


def test_more_choices_than_max_num_seqs_all_end() -> None:
    rig = make_rig(make_config(max_num_seqs=2))
    request = make_request("a", range(1, 10), params=params(3, n=7))
    rig.add(request)
    rig.finish()
    assert rig.tokens() == rig.expected(request)
    assert max(len(scheduler_output.scheduled) for scheduler_output in rig.runner.steps) == 2


@pytest.mark.parametrize("caching", [True, False])
def test_choices_continue_if_the_first_is_aborted_during_prefill(caching: bool) -> None:
    rig = make_rig(make_config(max_num_batched_tokens=4, enable_prefix_caching=caching))
    request = make_request("a", range(1, 11), params=params(3, n=3))
    rig.add(request)
    rig.step()
    rig.scheduler.abort("a", 0)
    rig.finish()
    expected = rig.expected(request)
    del expected["a", 0]
    assert rig.tokens() == expected


def test_choices_continue_if_the_first_ends_with_its_first_token() -> None:
    rig = make_rig()
    request = make_request("a", range(1, 9), params=params(1, n=3))
    rig.add(request)
    rig.finish()
    assert rig.tokens() == rig.expected(request)


def test_resumed_choices_continue_and_keep_their_tokens() -> None:
    rig = make_rig()
    prompt = range(1, 7)
    fresh = make_request("a", prompt, params=params(8, n=3))
    full = [rig.runner.expected(fresh, choice)[0] for choice in range(3)]
    request = make_request(
        "a", prompt, params=params(8, n=3), resume=(full[0][:5], (), full[2][:2])
    )
    rig.add(request)
    rig.finish()
    assert rig.tokens() == rig.expected(request)
    assert min(out.index for out in rig.outputs if out.choice == 0) == 5
    assert sum(len(scheduler_output.scheduled) for scheduler_output in rig.runner.steps) < 3 * 8 + 3


def test_a_resumed_choice_that_had_ended_ends_at_once_with_its_reason() -> None:
    rig = make_rig()
    stops = SamplingParams(max_tokens=3, n=3, stop_token_ids=[7])
    request = make_request("a", [1, 2], params=stops, resume=((5, 0), (5, 7), (5, 6, 8)))
    rig.add(request)
    assert [(out.choice, out.index, out.token_ids) for out in rig.outputs] == [
        (0, 2, ()),
        (1, 2, ()),
        (2, 3, ()),
    ]
    assert [(out.finish_reason, out.stop_token) for out in rig.outputs] == [
        (FinishReason.STOP, None),
        (FinishReason.STOP, 7),
        (FinishReason.LENGTH, None),
    ]
    assert not rig.scheduler.has_work


def test_an_aborted_request_gives_no_more_outputs_and_frees_its_blocks() -> None:
    rig = make_rig(make_config(max_num_seqs=1))
    rig.add(make_request("a", [1, 2, 3]), make_request("b", [4]))
    rig.step()
    rig.scheduler.abort("a")
    rig.scheduler.abort("b")
    assert not rig.scheduler.has_work
    assert rig.scheduler.schedule() is None
    stats = rig.scheduler.stats()
    assert (stats.blocks_used, stats.running, stats.waiting) == (0, 0, 0)


def test_one_choice_can_be_aborted() -> None:
    rig = make_rig()
    request = make_request("a", [1, 2, 3], params=params(4, n=2))
    rig.add(request)
    rig.step(2)
    rig.scheduler.abort("a", 1)
    rig.finish()
    assert len(rig.tokens()["a", 0]) == 4
    assert len(rig.tokens()["a", 1]) == 1


def test_aborting_an_unknown_request_does_nothing() -> None:
    rig = make_rig()
    rig.add(make_request("a", [1]))
    rig.scheduler.abort("b")
    rig.scheduler.abort("a", 5)
    rig.finish()
    assert len(rig.tokens()["a", 0]) == 4


def test_a_token_sampled_for_an_aborted_choice_is_dropped() -> None:
    rig = make_rig()
    a, b = make_request("a", [1]), make_request("b", [2])
    rig.add(a, b)
    scheduler_output = rig.scheduler.schedule()
    assert scheduler_output is not None
    result: StepResult = rig.runner.execute(scheduler_output)
    rig.scheduler.abort("a")
    rig.outputs += rig.scheduler.update(scheduler_output, result)
    rig.finish()
    assert rig.tokens() == rig.expected(b)


def test_an_id_may_be_used_again_once_its_request_ended() -> None:
    rig = make_rig()
    rig.add(make_request("a", [1]))
    with pytest.raises(RequestError, match="request_id"):
        rig.add(make_request("a", [1]))
    rig.finish()
    rig.add(make_request("a", [1]))
    assert rig.scheduler.has_work


def refused(rig: Rig, prompt: list[int], given: SamplingParams, *resume: tuple[int, ...]) -> str:
    with pytest.raises(RequestError) as caught:
        rig.add(make_request("a", prompt, params=given, resume=resume))
    assert not rig.scheduler.has_work
    return str(caught.value)


def test_requests_that_cannot_run_are_refused_with_the_reason() -> None:
    rig = make_rig(num_blocks=8, max_model_len=40)
    assert "empty" in refused(rig, [], params())
    assert "token id 50" in refused(rig, [1, 50], params())
    assert "token id -1" in refused(rig, [-1], params())
    assert "context of 40" in refused(rig, [1] * 40, params())
    assert "KV cache holds 32" in refused(rig, [1] * 32, params(None))
    assert "KV cache holds 32" in refused(rig, [1] * 20, params(13))
    assert "stop_token_ids" in refused(rig, [1], SamplingParams(stop_token_ids=[50]))


def test_an_impossible_resume_is_refused() -> None:
    rig = make_rig()
    assert "n is 2" in refused(rig, [1], params(4, n=2), (1,))
    assert "resume[0] has 5 tokens" in refused(rig, [1], params(4), (1, 2, 3, 4, 5))
    assert "resume[1] has token id 99" in refused(rig, [1], params(4, n=2), (), (99,))


def test_blocks_are_counted_as_used_cached_and_free() -> None:
    rig = make_rig(num_blocks=10)
    rig.add(make_request("a", range(1, 10)))
    rig.step()
    stats = rig.scheduler.stats()
    assert (stats.blocks_used, stats.blocks_cached, stats.blocks_free) == (3, 0, 7)
    assert stats.kv_utilization == 0.3
    rig.finish()
    stats = rig.scheduler.stats()
    assert (stats.blocks_used, stats.blocks_cached, stats.blocks_free) == (0, 3, 7)
