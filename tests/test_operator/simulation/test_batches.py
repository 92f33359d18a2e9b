"""Batches in the simulator: their order, their place on engines, their pace, and their gain."""

from dataclasses import replace

import numpy as np
import pytest

from headrace_common.protocol.base import QueueLimits
from headrace_common.protocol.batches import is_behind
from headrace_operator.scaling import ScalingPolicy
from headrace_operator.simulation import __main__ as command
from headrace_operator.simulation.comparison import Comparison, with_room_to_scale
from headrace_operator.simulation.errors import SimulationError
from headrace_operator.simulation.result import Objectives, SimulationResult
from headrace_operator.simulation.workload import (
    BatchLoad,
    Diurnal,
    Trace,
    diurnal,
    with_batches,
)
from headrace_testing.simulations import ROUND, run, trace


def shared(given: Trace, share: float = 1.0, window: float = 1e6) -> SimulationResult:
    """Simulates an engine that batches may fill up to a share."""
    objectives = Objectives(time_to_first_token=2.0, time_per_output_token=0.11)
    return run(given, objectives=objectives, low_priority_share=share, window=window)


def batch(count: int, *others: tuple[float, int, int]) -> Trace:
    """A batch of equal requests at second 0, and other requests after it."""
    given = trace(*[(0.0, 100, 100)] * count, *others)
    return replace(given, batches=np.array([0] * count + [-1] * len(others)))


def test_other_requests_start_before_those_of_batches() -> None:
    """A step takes 0.1 s and an engine runs 4 sequences: 40 lines are 10 rounds of 10 s."""
    alone, beside = shared(batch(40)), shared(batch(40, (30.0, 100, 1)))

    assert alone.longest_batch == pytest.approx(100, rel=0.1)
    assert alone.attainment == 1.0, "lines have no objectives"
    assert beside.time_to_first_token["p50"] < 10.5, "after the lines that run, before all others"


def test_engines_leave_room_beside_batches() -> None:
    met = [shared(batch(40, (25.0, 100, 1)), share).attainment for share in (1.0, 0.75)]

    assert met == [0.0, 1.0]


def test_a_batch_that_is_too_late_loses_its_lines() -> None:
    result = shared(batch(40), window=50.0)

    assert 10 <= result.expired <= 24


def test_a_batch_is_behind_if_it_would_end_after_three_quarters_of_its_window() -> None:
    def behind(now: float, done: int) -> bool:
        return is_behind(created=100, expires=500, now=now, total=100, done=done)

    assert not behind(200, 0)
    assert behind(300, 49) and not behind(300, 50)
    assert behind(400, 99) and behind(499, 99) and not behind(499, 100)


def test_batches_are_a_share_of_all_requests() -> None:
    given = diurnal(Diurnal(seconds=3600, peak_rate=1.0))
    mixed = with_batches(given, BatchLoad(share=0.25, count=2))

    assert mixed.batches is not None
    assert np.mean(mixed.batches >= 0) == pytest.approx(0.25, abs=0.01)
    assert np.all(np.diff(mixed.arrivals) >= 0)
    assert np.array_equal(mixed.interactive().arrivals, given.arrivals)


def test_batches_that_yield_cost_less_and_end_in_time() -> None:
    load = Diurnal(seconds=1800, day=1800, peak_rate=2.0, output_mean=100, bursts=0)
    given = with_batches(diurnal(load), BatchLoad(share=0.3, count=2))
    profile = replace(ROUND, max_num_seqs=32, kv_tokens=200_000, decode_step={1: 0.02, 32: 0.03})
    comparison = Comparison(
        trace=given,
        profile=profile,
        policy=with_room_to_scale(given, profile, ScalingPolicy()),
        objectives=Objectives(),
        limits=QueueLimits(),
        batch_window=1800,
    )
    scaled, yielding = comparison.run(("headrace", "yield"))

    assert yielding.gpu_hours < scaled.gpu_hours
    assert yielding.expired == yielding.refused == 0
    assert yielding.longest_batch is not None and yielding.longest_batch < 1800


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "yield"], "needs --batch-share"),
        (["--batch-share", "0.3", "--oracle"], "knows no batches"),
        (["--batch-share", "0.3", "--models", "2"], "for one model"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], words: str) -> None:
    with pytest.raises(SimulationError, match=words):
        command.app(options, standalone_mode=False)
