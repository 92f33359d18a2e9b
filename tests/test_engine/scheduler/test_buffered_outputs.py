"""Beam search and best_of in the scheduler: which outputs are returned and when, also with little
memory. The fake runner checks each step's blocks. test_beam_search.py compares the results of the
search with transformers' on a real model."""

from collections import Counter

import pytest

from headrace_common.sampling.params import SamplingError, SamplingParams
from headrace_engine.core.errors import RequestError
from headrace_engine.core.outputs import SequenceOutput
from headrace_engine.core.request import EngineRequest, FinishReason, Sequence
from headrace_engine.scheduler.policies import make_policy
from headrace_testing.engine import Rig, make_config, make_request, make_rig


def beams(width: int, n: int = 1, max_tokens: int = 8, **options: object) -> SamplingParams:
    return SamplingParams(
        n=n,
        best_of=width,
        use_beam_search=True,
        max_tokens=max_tokens,
        **options,  # type: ignore[arg-type]
    )


def best(width: int, n: int, max_tokens: int = 6) -> SamplingParams:
    return SamplingParams(n=n, best_of=width, max_tokens=max_tokens)


def answer(rig: Rig, request_id: str) -> list[tuple[int, ...]]:
    found = [output for output in rig.outputs if output.request_id == request_id]
    assert [output.choice for output in found] == list(range(len(found)))
    assert all(output.index == 0 and output.finish_reason for output in found)
    return [output.token_ids for output in found]


def expected(rig: Rig, request: EngineRequest) -> list[tuple[int, ...]]:
    return [each.tokens for each in rig.runner.expected_beams(request)]


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_beams_equal_an_exhaustive_search(width: int, early_stopping: bool | str) -> None:
    rig = make_rig()
    request = make_request(
        "a", range(1, 8), params=beams(width, n=width, early_stopping=early_stopping)
    )
    rig.add(request)
    rig.finish()
    assert answer(rig, "a") == expected(rig, request)
    assert rig.scheduler.stats().blocks_used == 0


def test_beams_share_the_blocks_of_their_common_prefix() -> None:
    rig = make_rig()
    rig.add(make_request("a", range(1, 33), params=beams(4, max_tokens=6, ignore_eos=True)))
    rig.step(4)
    running = list(rig.scheduler.running())
    assert len(running) == 4
    assert all(sequence.block_table[:8] == running[0].block_table[:8] for sequence in running)
    assert rig.scheduler.stats().blocks_used <= 8 + 4


def test_a_beam_is_copied_only_when_it_is_written() -> None:
    rig = make_rig()
    rig.add(make_request("a", range(1, 6), params=beams(3, ignore_eos=True)))
    rig.step(1)
    tables = [sequence.block_table for sequence in rig.scheduler.running()]
    assert len(tables) == 3 and tables.count(tables[0]) == 3
    rig.step(1)
    assert len(rig.runner.steps[-1].copies) == 2


def test_no_output_is_sent_before_the_end() -> None:
    rig = make_rig()
    rig.add(make_request("a", range(1, 8), params=beams(3, n=2, ignore_eos=True)))
    rig.add(make_request("b", range(9, 14), params=best(3, 2)))
    rig.step(4)
    assert not rig.outputs
    rig.finish()
    assert Counter(output.request_id for output in rig.outputs) == {"a": 2, "b": 2}


def test_beams_under_memory_pressure_give_the_same_result() -> None:
    rig = make_rig(make_config(enable_prefix_caching=False), num_blocks=12)
    early = make_request("early", [9] * 8, params=SamplingParams(max_tokens=30, ignore_eos=True))
    params = beams(3, n=3, max_tokens=12, ignore_eos=True)
    late = make_request("late", range(1, 9), params=params, arrival=1.0)
    rig.add(early, late)
    rig.finish()
    assert rig.scheduler.stats().preemptions >= 3, "the beams gave way together"
    assert answer(rig, "late") == expected(rig, late)


def test_searches_that_do_not_fit_together_end_one_after_the_other() -> None:
    rig = make_rig(make_config(max_num_seqs=4, max_num_batched_tokens=5), num_blocks=16)
    requests = [
        make_request(name, [k] * 5, params=beams(4, n=4, max_tokens=9), arrival=float(k))
        for k, name in enumerate("abc", 1)
    ]
    rig.add(*requests)
    rig.finish()
    for request in requests:
        assert answer(rig, request.request_id) == expected(rig, request)


@pytest.mark.parametrize("policy", ["fair", "priority", "sjf", "deadline"])
def test_beams_run_under_every_policy(policy: str) -> None:
    rig = make_rig(make_config(max_num_seqs=5), num_blocks=20, policy=make_policy(policy, {}))
    requests = [
        make_request(f"r{k}", [k] * 6, params=params, priority=-k, tenant=f"t{k % 2}")
        for k, params in enumerate([beams(3), best(4, 1), beams(4, n=2), beams(2)], 1)
    ]
    rig.add(*requests)
    rig.finish()
    for request in requests:
        tokens = answer(rig, request.request_id)
        if request.params.use_beam_search:
            assert tokens == expected(rig, request)
        else:
            assert tokens == rig.runner.expected_best(request)


def test_a_beam_waits_for_slower_beams_of_its_request() -> None:
    config = make_config(max_num_batched_tokens=6, enable_prefix_caching=False)
    rig = make_rig(config, num_blocks=14)
    early = make_request("early", [9] * 8, params=SamplingParams(max_tokens=30, ignore_eos=True))
    params = beams(3, n=3, max_tokens=12, ignore_eos=True)
    late = make_request("late", range(1, 9), params=params, arrival=1.0)
    rig.add(early, late)
    waited = 0
    while rig.scheduler.has_work:
        rig.step()
        done = [seq for seq in rig.scheduler.running() if seq.request.request_id == "late"]
        waited += any(seq not in scheduled(rig) for seq in done)
    assert waited > 0, "all of them computed in every step"
    assert answer(rig, "late") == expected(rig, late)


def scheduled(rig: Rig) -> set[Sequence]:
    return {item.sequence for item in rig.runner.steps[-1].scheduled}


def test_best_of_returns_the_likeliest_choices() -> None:
    rig = make_rig()
    request = make_request("a", range(1, 8), params=best(6, 2))
    rig.add(request)
    rig.finish()
    assert answer(rig, "a") == rig.runner.expected_best(request)
    assert all(output.logprobs is None for output in rig.outputs), "no client asked for them"


def test_log_probabilities_are_those_that_were_asked_for() -> None:
    rig = make_rig()
    searched = SamplingParams(n=1, best_of=3, use_beam_search=True, max_tokens=5, logprobs=2)
    sampled = SamplingParams(n=1, best_of=3, max_tokens=5, logprobs=0)
    rig.add(make_request("a", range(1, 8), params=searched))
    rig.add(make_request("b", range(1, 8), params=sampled))
    rig.finish()
    for output in rig.outputs:
        count = 2 if output.request_id == "a" else 0
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids)
        assert all(len(entry.top) == count for entry in output.logprobs)
        prompt = tuple(range(1, 8))
        for end, entry in enumerate(output.logprobs):
            tokens = (*prompt, *output.token_ids[: end + 1])
            wanted = rig.runner.token_logprobs(make_request("x", prompt, params=searched), tokens)
            assert (entry.logprob, entry.rank) == (wanted.logprob, wanted.rank)


def test_a_request_begun_by_another_engine_starts_again() -> None:
    rig = make_rig()
    request = make_request("a", range(1, 8), params=beams(2, n=2), resume=((5, 6), ()))
    rig.add(request)
    rig.finish()
    assert answer(rig, "a") == expected(rig, make_request("a", range(1, 8), params=beams(2, n=2)))


@pytest.mark.parametrize("params", [beams(4, n=2), best(4, 2)])
def test_a_choice_that_is_aborted_is_left_out(params: SamplingParams) -> None:
    rig = make_rig()
    rig.add(make_request("a", range(1, 8), params=params))
    rig.step(2)
    rig.scheduler.abort("a", 0)
    rig.finish()
    assert [output.choice for output in rig.outputs] == [1]
    rig.add(make_request("a", range(1, 8), params=params))
    rig.step(2)
    rig.scheduler.abort("a", 0)
    rig.scheduler.abort("a", 1)
    assert not rig.scheduler.has_work, "all its clients are gone"


@pytest.mark.parametrize("params", [beams(4, n=2), best(4, 2)])
def test_an_aborted_search_frees_everything(params: SamplingParams) -> None:
    rig = make_rig()
    rig.add(make_request("a", range(1, 8), params=params))
    rig.step(3)
    rig.scheduler.abort("a")
    stats = rig.scheduler.stats()
    assert not rig.scheduler.has_work
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    rig.add(make_request("a", range(1, 8), params=params))
    rig.finish()
    assert len(rig.outputs) == 2


@pytest.mark.parametrize("params", [beams(3, n=2, max_tokens=20), best(3, 2, 20)])
def test_a_search_that_is_late_ends_without_an_answer(params: SamplingParams) -> None:
    now = 0.0
    rig = make_rig(policy=make_policy("deadline", {}, lambda: now))
    rig.add(make_request("a", range(1, 8), params=params, deadline=5.0))
    rig.step(2)
    now = 6.0
    rig.step()
    ends = [(o.choice, o.index, o.token_ids, o.finish_reason) for o in rig.outputs]
    assert ends == [(0, 0, (), FinishReason.ABORT), (1, 0, (), FinishReason.ABORT)]
    assert not rig.scheduler.has_work


def broken_step(rig: Rig) -> list[SequenceOutput]:
    scheduler_output = rig.scheduler.schedule()
    assert scheduler_output is not None
    result = rig.runner.execute(scheduler_output)
    return rig.scheduler.update(scheduler_output, type(result)((None,) * len(result.sampled)))


@pytest.mark.parametrize("params", [beams(3, n=2), best(3, 2)])
def test_broken_logits_end_the_whole_request(params: SamplingParams) -> None:
    rig = make_rig()
    rig.add(make_request("a", range(1, 8), params=params))
    rig.step(3)
    outputs = broken_step(rig)
    assert [(o.choice, o.finish_reason) for o in outputs] == [
        (0, FinishReason.ERROR),
        (1, FinishReason.ERROR),
    ]
    assert not rig.scheduler.has_work


def test_beams_that_cannot_run_together_are_refused() -> None:
    rig = make_rig(make_config(max_num_seqs=4), num_blocks=10)
    with pytest.raises(RequestError, match="5 beams"):
        rig.add(make_request("a", [1], params=beams(5)))
    with pytest.raises(RequestError, match="do not fit"):
        rig.add(make_request("a", range(1, 9), params=beams(4, max_tokens=16)))
    many = beams(30, stop_token_ids=tuple(range(49)))
    large = make_rig(make_config(max_num_seqs=32), num_blocks=500)
    with pytest.raises(RequestError, match="stop_token_ids"):
        large.add(make_request("a", [1], params=many))
    assert not rig.scheduler.has_work


def test_beams_without_max_tokens_end_where_the_cache_does() -> None:
    rig = make_rig(make_config(max_num_seqs=4), num_blocks=11)
    params = SamplingParams(n=4, best_of=4, use_beam_search=True, max_tokens=None, ignore_eos=True)
    rig.add(make_request("a", range(1, 9), params=params))
    rig.finish()
    assert [len(tokens) for tokens in answer(rig, "a")] == [8] * 4


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "top_k": 5}, "top_k"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "min_tokens": 2}, "min_tokens"),
        ({"use_beam_search": True, "length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_parameters_without_meaning_are_refused(options: dict[str, object], field: str) -> None:
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**options)  # type: ignore[arg-type]
    assert caught.value.field == field
