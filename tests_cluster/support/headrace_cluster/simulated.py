"""The decisions of the operator's simulator for a load recorded on the cluster."""

from bisect import bisect_right
from collections.abc import Sequence
from statistics import median

import numpy as np

from headrace_common.protocol.base import QueueLimits
from headrace_operator.scaling import ScalingObservation
from headrace_operator.simulation.engine_profile import EngineProfile
from headrace_operator.simulation.result import Objectives
from headrace_operator.simulation.run import Setup, simulate
from headrace_operator.simulation.scalers import HeadraceScaler
from headrace_operator.simulation.workload import Trace
from headrace_operator.spec.scaling_policy import scaling_policy
from headrace_operator.spec.scaling_section import ScalingSpec

from .kubectl import Manifest
from .load import Answered
from .record import Sample
from .specs import ENGINE_SETTINGS

# The seconds by which the cluster may be earlier or later: pods start, metrics are read, windows
# end.
SHIFT_S = 30.0


def operator_scaler(scaling: Manifest) -> HeadraceScaler:
    """The simulator's scaler with the policy of a manifest's `scaling`."""
    return HeadraceScaler("operator", scaling_policy(ScalingSpec.model_validate(scaling)))


class _RecordedScaler:
    """The operator's decisions, with the time of each."""

    def __init__(self, scaling: Manifest) -> None:
        self._scaler = operator_scaler(scaling)
        self.name = self._scaler.name
        self.interval = self._scaler.interval
        self.decided: list[tuple[float, int]] = []

    def replicas(self, seen: ScalingObservation, now: float) -> int:
        wanted = self._scaler.replicas(seen, now)
        self.decided.append((now, wanted))
        return wanted


def profile(
    alone: Sequence[Answered], crowded: Sequence[Answered], tokens: int, engines: int, start: float
) -> EngineProfile:
    """The speed of an engine, from requests that ran alone and from requests that filled all
    engines.

    `tokens` is the length of an answer, `engines` the number that was filled, `start` the seconds
    from a pod's creation until it serves.
    """
    sequences = ENGINE_SETTINGS["maxNumSeqs"]
    step = median(each.ended - each.begun for each in alone) / tokens
    ends = sorted(each.ended for each in crowded)
    full = engines * sequences * (ends[-1] - ends[0]) / (tokens * (len(ends) - 1))
    return EngineProfile(
        name="cluster",
        prefill_tokens_per_second=10_000.0,
        decode_step={1: step, sequences: max(step, full)},
        max_num_seqs=sequences,
        max_num_batched_tokens=2048,
        kv_tokens=100_000,
        cold_start_seconds=start,
    )


def simulated(
    answered: Sequence[Answered],
    began: float,
    lengths: tuple[int, int],
    engine: EngineProfile,
    scaling: Manifest,
) -> list[tuple[float, int]]:
    """Seconds since `began`, and the number of engines that the simulator decided then.

    `lengths` are the tokens of a prompt and of an answer.
    """
    arrivals = np.array(sorted(each.begun - began for each in answered))
    prompts, outputs = (np.full(len(arrivals), length) for length in lengths)
    setup = Setup(
        trace=Trace(arrivals, prompts, outputs),
        profile=engine,
        objectives=Objectives(),
        limits=QueueLimits(),
        replicas=0,
    )
    return decisions(setup, scaling)


def decisions(setup: Setup, scaling: Manifest) -> list[tuple[float, int]]:
    """Seconds since the start of a simulation, and the number of engines that was decided then."""
    scaler = _RecordedScaler(scaling)
    simulate(setup, scaler)
    return scaler.decided


def within_one(counts: Sequence[tuple[float, int]], decided: Sequence[tuple[float, int]]) -> float:
    """The share of the counts that differ by at most one engine from the simulator's of the same
    time."""
    times = [at for at, _ in decided]
    wanted = [decided[bisect_right(times, at) - 1][1] for at, _ in counts]
    near = [abs(count - other) <= 1 for (_, count), other in zip(counts, wanted, strict=True)]
    return sum(near) / len(near)


def apart(samples: Sequence[Sample], decided: Sequence[tuple[float, int]]) -> list[str]:
    """The samples whose number of engines differs by more than one from the simulator's at that
    time."""
    found = []
    for sample in samples:
        near = [wanted for at, wanted in decided if abs(at - sample.at) <= SHIFT_S]
        if near and not min(near) - 1 <= sample.desired <= max(near) + 1:
            found.append(f"{sample.desired} after {sample.at:.0f} s, simulated {set(near)}")
    return found
