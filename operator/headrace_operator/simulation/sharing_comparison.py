"""Several models with accelerators of their own, beside the same models that share one."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np

from headrace_common.protocol.base import QueueLimits
from headrace_common.protocol.turns import TurnBounds

from ..scaling import ScalingPolicy
from .comparison import Comparison, with_room_to_scale
from .engine_profile import EngineProfile
from .result import Objectives, SimulationResult
from .sharing import SharedSetup, simulate_shared
from .workload import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsResult:
    """One way to serve all models: the share of requests that met the objectives, of all and by
    model, and the GPU-hours of all. Wake-ups are counted where models share."""

    name: str
    attainment: float
    by_model: tuple[float, ...]
    gpu_hours: float
    wake_ups: int = 0

    def summary(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class SharingComparison:
    """The inputs: a trace of each model, and engines that are alike.

    `bounds` are those of turns. The policy's maximum counts if it is `bounded`.
    """

    traces: tuple[Trace, ...]
    profile: EngineProfile
    policy: ScalingPolicy
    objectives: Objectives
    limits: QueueLimits
    bounds: TurnBounds = TurnBounds()
    bounded: bool = False
    RUNS: ClassVar[int] = 4
    """The number of results of `run`."""

    def run(self) -> Iterator[ModelsResult]:
        """Yields a result for each way when its run has ended: fixed fleets apart, scaled fleets
        apart with `min_replicas` and from zero, and one shared accelerator."""
        yield self._apart("apart, fixed peak", "peak", None)
        least = max(1, self.policy.min_replicas)
        yield self._apart(f"apart, Headrace, at least {least}", "headrace", least)
        yield self._apart("apart, Headrace, from zero", "headrace", 0)
        yield self._shared()

    def _apart(self, name: str, policy: str, least: int | None) -> ModelsResult:
        results, hours = [], 0.0
        longest = max(trace.seconds for trace in self.traces)
        for trace in self.traces:
            (result,) = self._alone(trace, least).run((policy,))
            after = result.samples[-1].desired if policy == "peak" else least or 0
            hours += (longest - trace.seconds) / 3600 * after * self.profile.gpus
            results.append(result)
        return self._together(name, results, hours)

    def _alone(self, trace: Trace, least: int | None) -> Comparison:
        policy = self.policy if least is None else replace(self.policy, min_replicas=least)
        return Comparison(
            trace=trace,
            profile=self.profile,
            policy=policy if self.bounded else with_room_to_scale(trace, self.profile, policy),
            objectives=self.objectives,
            limits=self.limits,
        )

    def _together(self, name: str, results: list[SimulationResult], hours: float) -> ModelsResult:
        met = [result.attainment for result in results]
        return ModelsResult(
            name=name,
            attainment=float(np.average(met, weights=[result.requests for result in results])),
            by_model=tuple(met),
            gpu_hours=sum(result.gpu_hours for result in results) + hours,
        )

    def _shared(self) -> ModelsResult:
        result = simulate_shared(
            SharedSetup(
                traces=self.traces,
                profile=self.profile,
                objectives=self.objectives,
                limits=self.limits,
                bounds=self.bounds,
            )
        )
        return ModelsResult(
            name="sharing one accelerator",
            attainment=result.attainment,
            by_model=result.by_model,
            gpu_hours=result.gpu_hours,
            wake_ups=result.wake_ups,
        )
