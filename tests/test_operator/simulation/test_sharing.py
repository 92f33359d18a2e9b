"""Models that take turns on one accelerator: turns compared with hand calculations, and what they
save."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_common.protocol.base import QueueLimits
from headrace_common.protocol.turns import TurnBounds
from headrace_operator.scaling import ScalingPolicy
from headrace_operator.simulation import __main__ as command
from headrace_operator.simulation.engine_profile import load_profile
from headrace_operator.simulation.result import Objectives
from headrace_operator.simulation.sharing import SharedResult, SharedSetup, simulate_shared
from headrace_operator.simulation.sharing_comparison import SharingComparison
from headrace_operator.simulation.workload import Diurnal, Trace, diurnal
from headrace_testing.simulations import ROUND, trace

PROFILE = replace(ROUND, switch_seconds=2.0)


def share(*traces: Trace, **changes: object) -> SharedResult:
    setup = SharedSetup(
        traces=traces,
        profile=PROFILE,
        objectives=Objectives(time_to_first_token=1e9, time_per_output_token=0.11),
        limits=QueueLimits(),
    )
    return simulate_shared(replace(setup, **changes))  # type: ignore[arg-type]


def first_token_within(seconds: float) -> Objectives:
    return Objectives(time_to_first_token=seconds, time_per_output_token=0.11)


def test_an_engine_waits_until_the_other_one_has_nothing_to_do() -> None:
    """The slot is seen at 0.25 s, the first engine is awake at 2.25 s, begins at 2.85 s and ends at
    3.85 s. It leaves the slot at 4 s; the second one takes it at 4.25 s and begins at 6.85 s."""
    one, other = trace((0.0, 500, 11)), trace((1.0, 500, 11))

    def met(seconds: float) -> tuple[float, ...]:
        return share(one, other, objectives=first_token_within(seconds)).by_model

    assert met(2.84) == (0.0, 0.0)
    assert met(2.86) == (1.0, 0.0)
    assert met(5.84) == (1.0, 0.0)
    assert met(5.86) == (1.0, 1.0)


def test_a_long_answer_is_given_back_and_goes_on_after_the_other_models_turn() -> None:
    """In seconds: 2.25 awake, 10.25 asked to leave, 12.25 asleep; the other model is awake from
    14.5, and its answer of 1.6 s ends at 16.1. The first engine is awake again at 18.5; it has some
    98 tokens, computes them and the prompt of 1 again, and its last 102 tokens end at 28.9."""
    bounds = TurnBounds(min_awake=5.0, max_awake=10.0)
    turns = {"bounds": bounds, "timeout": 2.0}
    one, other = trace((0.0, 1, 200)), trace((1.0, 500, 11))

    result = share(one, other, **turns)
    per_token = (28.9 - 2.35) / 199

    assert result.wake_ups == 3
    assert result.lost == 0
    assert result.by_model == (0.0, 1.0)
    for seconds, met in ((per_token - 0.003, 0.0), (per_token + 0.003, 1.0)):
        objectives = Objectives(time_to_first_token=1e9, time_per_output_token=seconds)
        assert share(one, other, objectives=objectives, **turns).by_model[0] == met


def test_requests_that_the_queue_refuses_or_that_wait_too_long_are_lost() -> None:
    long, crowd = trace((0.0, 1, 1000)), trace(*[(1.0, 1, 2)] * 5)

    assert share(long, crowd, limits=QueueLimits(max_requests=3)).lost == 2
    assert share(long, crowd, bounds=TurnBounds(90.0, 90.0), deadline=30.0).lost == 5


def test_models_with_other_hours_share_for_a_fifth_less_and_meet_the_objectives_as_often() -> None:
    load = Diurnal(seconds=7200, day=7200, peak_rate=0.6, bursts=0, open_hours=11.5)
    traces = tuple(diurnal(replace(load, seed=seed, shift=seed / 2)) for seed in (1, 2))
    comparison = SharingComparison(
        traces=traces,
        profile=load_profile(None),
        policy=ScalingPolicy(),
        objectives=Objectives(),
        limits=QueueLimits(),
    )

    fixed, scaled, _, shared = comparison.run()

    assert shared.gpu_hours <= 0.8 * min(fixed.gpu_hours, scaled.gpu_hours)
    assert shared.attainment >= min(fixed.attainment, scaled.attainment) - 0.01


def test_a_shorter_trace_alone_costs_its_engines_until_the_longer_one_ends() -> None:
    comparison = SharingComparison(
        traces=(trace((0.0, 1, 1), (3600.0, 1, 1)), trace((0.0, 1, 1), (1800.0, 1, 1))),
        profile=PROFILE,
        policy=ScalingPolicy(),
        objectives=Objectives(),
        limits=QueueLimits(),
    )

    fixed, _, from_zero, shared = comparison.run()

    assert fixed.gpu_hours == pytest.approx(2.0)
    assert from_zero.gpu_hours < 2.0
    assert shared.gpu_hours == pytest.approx(1.0)


def command_output(monkeypatch: pytest.MonkeyPatch, *options: str) -> int | str | None:
    monkeypatch.setattr("sys.argv", ["headrace simulate", *options])
    with pytest.raises(SystemExit) as exited:
        command.main()
    return exited.value.code


def test_the_command_compares_models_that_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "arrival_seconds,prompt_tokens,output_tokens\n0,100,20\n600,100,20\n"
    files = [tmp_path / name for name in ("one.csv", "two.csv")]
    for file in files:
        file.write_text(rows)
    results = tmp_path / "results.json"
    named = [option for file in files for option in ("--trace", str(file))]

    code = command_output(monkeypatch, *named, "--json", str(results))

    assert not code
    written = json.loads(results.read_text())
    assert written["inputs"]["requests"] == [2, 2]
    assert [each["name"] for each in written["results"]][-1] == "sharing one accelerator"
    assert written["results"][-1]["gpu_hours"] == pytest.approx(600 / 3600)
    assert "wake-ups" in capsys.readouterr().out


def test_made_up_models_have_their_days_at_other_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = command_output(monkeypatch, "--models", "2", "--days", "0.02", "--peak-rate", "1")

    assert not code
    assert "of 2 models" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--models", "2", "--oracle"), "--oracle and --plot are for one model"),
        (("--models", "2", "--min-awake", "90"), "--min-awake 90: it must not be above"),
        (("--models", "2", "--trace", "a.csv"), "--models is for made-up traces"),
    ],
)
def test_options_for_one_model_and_for_several_do_not_mix(
    options: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert command_output(monkeypatch, *options) == 2
    assert message in capsys.readouterr().err
