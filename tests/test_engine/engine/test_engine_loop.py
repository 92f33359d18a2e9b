"""The engine and the thread that owns it. Tests wait for events, with limits that no machine
reaches."""

from collections.abc import Iterator
from queue import Queue
from threading import Event

import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.batch_snapshot import BatchSnapshot
from headrace_engine.core.errors import RequestError
from headrace_engine.core.outputs import SequenceOutput
from headrace_engine.core.request import FinishReason
from headrace_engine.core.stats import SchedulerStats
from headrace_engine.core.step_plan import SchedulerOutput, StepResult
from headrace_engine.engine.engine import Engine
from headrace_engine.engine.engine_loop import EngineLoop
from headrace_testing.engine import make_config, make_request
from headrace_testing.fake_runner import FakeRunner

LIMIT = 60.0


class GatedRunner(FakeRunner):
    """Computes a step only when `gate` is set; sets `entered` when it has begun one."""

    def __init__(self, *, async_scheduling: bool) -> None:
        super().__init__(async_scheduling=async_scheduling)
        self.gate = Event()
        self.gate.set()
        self.entered = Event()
        self.error: Exception | None = None

    def execute(self, scheduler_output: SchedulerOutput) -> StepResult:
        self.entered.set()
        assert self.gate.wait(LIMIT)
        if self.error is not None:
            raise self.error
        return super().execute(scheduler_output)


class Desk:
    """A loop over a gated runner, and all its callbacks."""

    def __init__(self, *, async_scheduling: bool) -> None:
        self.runner = GatedRunner(async_scheduling=async_scheduling)
        self.now = 100.0
        self.steps: Queue[tuple[list[SequenceOutput], SchedulerStats]] = Queue()
        self.rejected: Queue[tuple[str, RequestError]] = Queue()
        self.failures: Queue[Exception] = Queue()
        self.engine = Engine(make_config(), self.runner)
        self.loop = EngineLoop(
            self.engine,
            on_step=lambda outputs, stats, _: self.steps.put((outputs, stats)),
            on_rejected=lambda request_id, error: self.rejected.put((request_id, error)),
            on_failure=self.failures.put,
            clock=lambda: self.now,
        )

    def until_finished(self, request_id: str) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        while True:
            outputs, _ = self.steps.get(timeout=LIMIT)
            for output in outputs:
                if output.request_id == request_id:
                    tokens += output.token_ids
                    if output.finish_reason is not None:
                        return tokens


@pytest.fixture(params=[False, True], ids=["waiting", "ahead"])
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    desk = Desk(async_scheduling=request.param)
    desk.loop.start()
    yield desk
    desk.runner.gate.set()
    desk.loop.stop()
    assert desk.loop.join(LIMIT)


def long_params() -> SamplingParams:
    return SamplingParams(max_tokens=100, ignore_eos=True)


def test_a_request_runs_to_its_end(desk: Desk) -> None:
    request = make_request("a", [1, 2, 3])
    desk.loop.add(request)
    assert desk.until_finished("a") == desk.runner.expected(request, 0)[0]


def test_each_step_reports_its_statistics(desk: Desk) -> None:
    desk.loop.add(make_request("a", [1, 2, 3]))
    _, stats = desk.steps.get(timeout=LIMIT)
    assert (stats.running, stats.step_prefill_tokens) == (1, 3)


def test_a_request_that_cannot_run_is_rejected_and_the_next_one_served(desk: Desk) -> None:
    desk.loop.add(make_request("bad", []))
    request_id, error = desk.rejected.get(timeout=LIMIT)
    assert request_id == "bad"
    assert "prompt_token_ids" in str(error)
    desk.loop.add(make_request("good", [1]))
    assert len(desk.until_finished("good")) == 4


def test_an_aborted_request_gives_no_more_outputs(desk: Desk) -> None:
    desk.runner.gate.clear()
    desk.loop.add(make_request("a", [1], params=long_params()))
    assert desk.runner.entered.wait(LIMIT)
    desk.loop.abort("a")
    desk.runner.gate.set()
    outputs, _ = desk.steps.get(timeout=LIMIT)
    assert [output.index for output in outputs] == [0]
    outputs, stats = desk.steps.get(timeout=LIMIT)
    assert outputs == []
    assert (stats.running, stats.blocks_used) == (0, 0), "the last word says that all is free"


def test_an_idle_loop_reports_its_statistics_after_an_abort(desk: Desk) -> None:
    desk.loop.add(make_request("a", [1]))
    desk.until_finished("a")
    desk.loop.abort("unknown")
    outputs, stats = desk.steps.get(timeout=LIMIT)
    assert (outputs, stats.running) == ([], 0)
    assert desk.steps.empty()
    assert desk.loop.alive


def test_the_heartbeat_stops_while_a_step_hangs(desk: Desk) -> None:
    desk.runner.gate.clear()
    desk.loop.add(make_request("a", [1]))
    assert desk.runner.entered.wait(LIMIT)
    desk.now = 500.0
    assert (desk.loop.busy, desk.loop.last_step_at) == (True, 100.0)
    desk.runner.gate.set()
    desk.until_finished("a")
    assert desk.loop.last_step_at == 500.0


def test_a_snapshot_is_taken_between_two_steps(desk: Desk) -> None:
    captured: Queue[BatchSnapshot] = Queue()
    desk.runner.gate.clear()
    desk.loop.add(make_request("a", [1, 2, 3], params=long_params()))
    desk.loop.add(make_request("b", [1], params=long_params()))
    assert desk.runner.entered.wait(LIMIT)
    desk.loop.capture(1, captured.put)
    assert captured.empty(), "a step is in flight"
    desk.runner.gate.set()
    snapshot = captured.get(timeout=LIMIT)
    (sequence,) = snapshot.sequences
    assert (sequence.request_id, sequence.prompt, sequence.max_output) == ("a", 3, 100)
    assert (sequence.phase, snapshot.left_out) == ("decode", 1)
    assert sequence.output >= 1
    assert snapshot.stats.running == 2


def test_an_idle_loop_takes_a_snapshot_too(desk: Desk) -> None:
    captured: Queue[BatchSnapshot] = Queue()
    desk.loop.capture(8, captured.put)
    snapshot = captured.get(timeout=LIMIT)
    assert (snapshot.sequences, snapshot.left_out, snapshot.stats.running) == ((), 0, 0)
    assert desk.steps.empty()


def test_a_drain_finishes_running_requests_and_refuses_new_ones(desk: Desk) -> None:
    desk.runner.gate.clear()
    desk.loop.add(make_request("a", [1]))
    assert desk.runner.entered.wait(LIMIT)
    desk.loop.drain()
    desk.loop.add(make_request("b", [1]))
    assert desk.rejected.get(timeout=LIMIT)[0] == "b"
    desk.runner.gate.set()
    assert len(desk.until_finished("a")) == 4
    assert desk.loop.join(LIMIT)


def test_an_idle_loop_drains_at_once(desk: Desk) -> None:
    desk.loop.drain()
    assert desk.loop.join(LIMIT)


def test_a_stop_ends_the_loop_after_the_current_step(desk: Desk) -> None:
    desk.runner.gate.clear()
    desk.loop.add(make_request("a", [1], params=long_params()))
    assert desk.runner.entered.wait(LIMIT)
    desk.loop.stop()
    desk.runner.gate.set()
    assert desk.loop.join(LIMIT)
    assert desk.steps.qsize() == 1
    assert not desk.loop.busy


def test_a_drain_also_ends_aborted_sequences_of_the_step_in_flight(desk: Desk) -> None:
    """A stop token is noticed late if steps run ahead."""
    tokens = desk.runner.expected(make_request("a", [1], params=long_params()), 0)[0]
    last = next(
        token for place, token in enumerate(tokens) if token not in tokens[:place] and place
    )
    params = SamplingParams(max_tokens=100, ignore_eos=True, stop_token_ids=[last])
    desk.loop.add(make_request("a", [1], params=params))
    desk.loop.drain()
    assert desk.until_finished("a") == tokens[: tokens.index(last) + 1]
    assert desk.loop.join(LIMIT)
    assert not desk.engine.has_work
    assert desk.engine.stats().blocks_used == 0


def test_a_step_that_raises_is_reported_once_and_ends_the_loop(desk: Desk) -> None:
    desk.runner.error = RuntimeError("the device is gone")
    desk.loop.add(make_request("a", [1]))
    assert desk.failures.get(timeout=LIMIT) is desk.runner.error
    assert desk.loop.join(LIMIT)
    desk.loop.add(make_request("b", [1]))
    assert desk.rejected.get(timeout=LIMIT)[0] == "b"
    assert desk.failures.empty()


def test_the_engine_returns_the_end_of_a_finished_resume() -> None:
    engine = Engine(make_config(), FakeRunner())
    engine.add_request(make_request("a", [1], resume=((5, 6, 7, 8),)))
    assert engine.has_work
    (output,) = engine.step()
    assert (output.index, output.finish_reason) == (4, FinishReason.LENGTH)
    assert not engine.has_work
    assert engine.step() == []


def test_the_engine_does_not_return_the_end_of_an_aborted_resume() -> None:
    engine = Engine(make_config(), FakeRunner())
    engine.add_request(make_request("a", [1], resume=((5, 6, 7, 8),)))
    engine.abort("a")
    assert not engine.has_work
