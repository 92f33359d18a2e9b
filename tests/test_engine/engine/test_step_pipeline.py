"""Scheduling while a step is in flight. The fake runner computes a step as late as it may."""

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.request import FinishReason
from headrace_engine.engine.step_pipeline import StepPipeline
from headrace_engine.scheduler.policies.priority import Priority
from headrace_testing.engine import Rig, make_config, make_request, make_rig


def params(max_tokens: int, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, stop_token_ids=stop_token_ids)


class Line:
    """A rig whose steps run ahead of each other."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.pipeline = StepPipeline(rig.scheduler, rig.runner.submit)

    def step(self) -> None:
        self.rig.outputs += self.pipeline.step()

    def finish(self) -> None:
        while self.rig.scheduler.has_work or self.pipeline.busy:
            self.step()

    def lengths(self) -> list[int]:
        """The number of sequences in each step so far."""
        return [len(scheduler_output.scheduled) for scheduler_output in self.rig.runner.steps]


def test_an_output_that_ends_by_its_length_has_no_further_step() -> None:
    line = Line(make_rig())
    short, long = (
        make_request("a", [1, 2], params=params(2)),
        make_request("b", [3], params=params(5)),
    )
    line.rig.add(short, long)
    line.finish()
    assert line.lengths() == [2, 2, 1, 1, 1]
    assert line.rig.tokens() == line.rig.expected(short, long)


def test_an_output_that_a_stop_token_ends_has_one_more_step() -> None:
    rig = make_rig()
    undisturbed = rig.runner.expected(make_request("a", [1], params=params(9)), 0)[0]
    last = next(
        token for at, token in enumerate(undisturbed) if at and token not in undisturbed[:at]
    )
    request = make_request("a", [1], params=params(9, stop_token_ids=(last,)))
    line = Line(rig)
    rig.add(request)
    line.finish()
    assert rig.tokens()["a", 0] == undisturbed[: undisturbed.index(last) + 1]
    assert rig.outputs[-1].finish_reason is FinishReason.STOP
    assert len(rig.runner.steps) == len(rig.tokens()["a", 0]) + 1
    assert rig.scheduler.stats().blocks_used == 0


def test_no_sequence_is_preempted_while_a_step_is_in_flight() -> None:
    line = Line(make_rig(make_config(max_num_seqs=2), num_blocks=6))
    requests = [make_request(name, [k] * 8, params=params(9)) for k, name in enumerate("ab", 1)]
    line.rig.add(*requests)
    line.finish()
    assert line.rig.scheduler.stats().preemptions == 1
    assert line.rig.tokens() == line.rig.expected(*requests)
    waited = [scheduler_output.ahead for scheduler_output in line.rig.runner.steps].count(False)
    assert 2 <= waited < len(line.rig.runner.steps) / 2


def test_a_request_that_may_preempt_another_waits_for_the_step_in_flight() -> None:
    line = Line(make_rig(make_config(max_num_seqs=1), policy=Priority()))
    low = make_request("low", [1, 2], params=params(8))
    high = make_request("high", [3, 4], params=params(3), priority=-1)
    line.rig.add(low)
    line.step()
    line.rig.add(high)
    line.finish()
    assert line.rig.tokens() == line.rig.expected(low, high)
    ends = [output.request_id for output in line.rig.outputs if output.finish_reason is not None]
    assert ends == ["high", "low"]


def test_an_abort_in_flight_frees_everything() -> None:
    line = Line(make_rig())
    gone, stays = make_request("a", [1], params=params(9)), make_request("b", [2], params=params(6))
    line.rig.add(gone, stays)
    line.step()
    line.rig.scheduler.abort("a")
    line.finish()
    assert line.rig.tokens()["b", 0] == line.rig.expected(stays)["b", 0]
    assert len(line.rig.tokens()["a", 0]) == 1
    assert line.rig.scheduler.stats().blocks_used == 0


def test_statistics_are_of_the_step_that_ended() -> None:
    line = Line(make_rig(make_config(max_num_batched_tokens=4)))
    line.rig.add(make_request("a", range(1, 11), params=params(3)))
    seen = []
    for _ in range(4):
        line.step()
        stats = line.rig.scheduler.stats()
        seen.append((stats.step_prefill_tokens, stats.step_decode_tokens))
    assert seen == [(4, 0), (4, 0), (2, 0), (0, 1)]
