"""The same trace under several policies: fixed fleets, HPA, KEDA, Headrace and the oracle."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from headrace_common.protocol.base import QueueLimits

from ..scaling import ScalingPolicy
from .engine_profile import EngineProfile
from .oracle import Plan, cheapest, lower_bound
from .result import Objectives, SimulationResult
from .run import Setup, simulate
from .scalers import (
    FixedScaler,
    HeadraceScaler,
    HpaScaler,
    KedaScaler,
    PlannedScaler,
    SimulatedScaler,
)
from .workload import Trace

PEAK_WINDOW = 300.0
"""The fixed peak fleet is sized for the busiest window of this many seconds."""
START_WINDOW = 1800.0
"""Scaled fleets start with the engines that this many first seconds of the trace need."""
MOST_ENGINES = 1000

POLICIES = ("peak", "mean", "hpa", "keda", "headrace")
YIELD = "yield"
"""Headrace with batches that yield: a policy for traces with batches."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Engines at the target utilization: for the busiest minutes, the mean, and the beginning.
    Batches are left out."""

    peak: int
    mean: int
    start: int


def fleet_sizes(trace: Trace, profile: EngineProfile, utilization: float) -> Sizes:
    trace = trace.interactive()
    prompt, output = float(trace.prompts.mean()), float(trace.outputs.mean())
    speed = profile.requests_per_second(utilization, prompt, output)
    first = np.count_nonzero(trace.arrivals <= START_WINDOW) / min(
        START_WINDOW, max(1.0, trace.seconds)
    )
    return Sizes(
        peak=max(1, ceil(trace.busiest_rate(min(PEAK_WINDOW, max(1.0, trace.seconds))) / speed)),
        mean=max(1, ceil(len(trace) / max(1.0, trace.seconds) / speed)),
        start=max(1, ceil(first / speed)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The inputs of a comparison. `policy.utilization` is the target of all scalers. Batches must
    end within `batch_window` seconds."""

    trace: Trace
    profile: EngineProfile
    policy: ScalingPolicy
    objectives: Objectives
    limits: QueueLimits
    batch_window: float = 86_400.0

    def sizes(self) -> Sizes:
        return fleet_sizes(self.trace, self.profile, self.policy.utilization)

    def run(self, names: tuple[str, ...] = POLICIES) -> Iterator[SimulationResult]:
        """Yields one result per policy when its run has ended."""
        sizes = self.sizes()
        for name in names:
            share = self.policy.utilization if name == YIELD else 1.0
            yield self._simulate(*self._scaler(name, sizes), low_priority_share=share)

    def oracle(self) -> SimulationResult:
        """The run of the cheapest plan that meets the objectives. Raises SimulationError."""
        _, result = cheapest(self.trace, self.profile, self._least, self._follow)
        return result

    def lower_bound(self) -> float:
        """GPU-hours that no fleet that meets the objectives can go below."""
        return lower_bound(self.trace, self.profile, self.objectives, self._least)

    @property
    def _least(self) -> int:
        return self.policy.min_replicas

    def _follow(self, plan: Plan) -> SimulationResult:
        return self._simulate(PlannedScaler("oracle", plan.counts), plan.first)

    def _simulate(
        self, scaler: SimulatedScaler, replicas: int, *, low_priority_share: float = 1.0
    ) -> SimulationResult:
        setup = Setup(
            trace=self.trace,
            profile=self.profile,
            objectives=self.objectives,
            limits=self.limits,
            replicas=replicas,
            window=self.batch_window,
            low_priority_share=low_priority_share,
        )
        return simulate(setup, scaler)

    def _scaler(self, name: str, sizes: Sizes) -> tuple[SimulatedScaler, int]:
        policy = self.policy
        start = policy.clamp(sizes.start)
        lowest, highest, target = policy.min_replicas, policy.max_replicas, policy.utilization
        match name:
            case "peak":
                return FixedScaler("fixed peak", sizes.peak), sizes.peak
            case "mean":
                return FixedScaler("fixed mean", sizes.mean), sizes.mean
            case "hpa":
                hpa = HpaScaler("HPA", target=target, lowest=lowest, highest=highest)
                return hpa, max(1, start)
            case "keda":
                requests = target * self.profile.max_num_seqs
                keda = KedaScaler("KEDA", target=requests, lowest=lowest, highest=highest)
                return keda, max(1, start)
            case "yield":
                yields = replace(policy, low_priority_yields=True)
                return HeadraceScaler("Headrace, yield", yields), start
        return HeadraceScaler("Headrace", policy), start


def with_room_to_scale(
    trace: Trace, profile: EngineProfile, policy: ScalingPolicy
) -> ScalingPolicy:
    """Returns the policy with a maximum of twice the fixed peak fleet, but at most 1,000
    engines."""
    peak = fleet_sizes(trace, profile, policy.utilization).peak
    most = min(MOST_ENGINES, max(2 * peak, policy.min_replicas, 1))
    return replace(policy, max_replicas=most)
