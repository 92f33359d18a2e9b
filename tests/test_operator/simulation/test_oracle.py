"""The oracle: its plan compared with hand calculations, and its place among the policies."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace_common.protocol.base import QueueLimits
from headrace_operator.scaling import ScalingPolicy
from headrace_operator.simulation import __main__ as command
from headrace_operator.simulation.comparison import Comparison, with_room_to_scale
from headrace_operator.simulation.engine_profile import load_profile
from headrace_operator.simulation.errors import SimulationError
from headrace_operator.simulation.oracle import GOAL, lower_bound, plan_for
from headrace_operator.simulation.result import Objectives
from headrace_operator.simulation.workload import Diurnal, Trace, diurnal
from headrace_testing.simulations import ROUND


def at_once(*groups: tuple[float, int], until: float, prompt: int = 1, output: int = 50) -> Trace:
    """Requests in groups (time, number) of equal length, and a short one at the end."""
    times = [at for at, count in groups for _ in range(count)] + [until]
    lengths = [(prompt, output)] * (len(times) - 1) + [(1, 1)]
    prompts, outputs = zip(*lengths, strict=True)
    return Trace(np.array(times, float), np.array(prompts), np.array(outputs))


def test_engines_are_started_one_cold_start_before_they_are_needed() -> None:
    plan = plan_for(at_once((300, 8), until=600), ROUND, 1.0, least=1)

    (_, one), (rises, two), (falls, least) = plan.counts
    assert (one, two, least) == (1, 2, 1)
    assert 235 <= rises <= 300 - 50
    assert 305 <= falls <= 315  # an answer takes five seconds


def test_an_engine_is_kept_through_a_gap_shorter_than_its_start() -> None:
    short = plan_for(at_once((300, 8), (345, 8), until=900), ROUND, 1.0, least=1)
    long = plan_for(at_once((300, 8), (500, 8), until=900), ROUND, 1.0, least=1)

    assert [count for _, count in short.counts] == [1, 2, 1]
    assert [count for _, count in long.counts] == [1, 2, 1, 2, 1]


def test_less_full_engines_and_full_kv_need_more_engines() -> None:
    def most(fullness: float, **lengths: int) -> int:
        plan = plan_for(at_once((300, 8), until=600, **lengths), ROUND, fullness, least=1)
        return max(count for _, count in plan.counts)

    assert [most(1.0), most(0.5)] == [2, 4]
    assert most(1.0, prompt=4950) == 4


def test_the_bound_is_the_least_work_of_all_but_the_largest_requests() -> None:
    trace = at_once((0, 99), until=3600, prompt=500, output=11)
    work = 500 / 1000 + 10 * 0.1 / 4
    few = lower_bound(trace, ROUND, Objectives(), least=0)
    two = lower_bound(trace, replace(ROUND, gpus=2), Objectives(), least=0)

    assert few * 3600 == pytest.approx(98 * work)
    assert two == pytest.approx(2 * few)
    assert lower_bound(trace, ROUND, Objectives(), least=3) == pytest.approx(3.0)


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_the_oracle_meets_the_objectives_for_less_than_any_policy(seed: int) -> None:
    """A day of half an hour, with its rhythm and a burst."""
    given = diurnal(Diurnal(seconds=1800, day=1800, peak_rate=6.0, bursts=1, seed=seed))
    profile = load_profile(None)
    comparison = Comparison(
        trace=given,
        profile=profile,
        policy=with_room_to_scale(given, profile, ScalingPolicy()),
        objectives=Objectives(),
        limits=QueueLimits(),
    )

    oracle, bound = comparison.oracle(), comparison.lower_bound()

    assert oracle.attainment >= GOAL
    assert 0.5 * oracle.gpu_hours < bound < oracle.gpu_hours
    for result in comparison.run(("peak", "hpa", "keda", "headrace")):
        assert result.gpu_hours > oracle.gpu_hours, result.name


def test_objectives_that_no_fleet_meets_are_refused() -> None:
    trace = at_once((0, 8), until=600)
    comparison = Comparison(
        trace=trace,
        profile=ROUND,
        policy=ScalingPolicy(),
        objectives=Objectives(time_per_output_token=0.01),
        limits=QueueLimits(),
    )

    with pytest.raises(SimulationError, match="no fleet meets the objectives for 99%"):
        comparison.oracle()


def test_the_command_prints_the_oracle_and_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.json"
    options = ["--days", "0.01", "--policy", "headrace", "--oracle", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["headrace simulate", *options])

    with pytest.raises(SystemExit) as exited:
        command.main()

    assert not exited.value.code
    written = json.loads(file.read_text())
    assert [each["name"] for each in written["results"]] == ["Headrace", "oracle"]
    assert 0 < written["inputs"]["lower_bound_gpu_hours"] < written["results"][1]["gpu_hours"]
    assert "costs less than" in capsys.readouterr().out
