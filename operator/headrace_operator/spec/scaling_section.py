"""The scaling section of a ModelService's spec. Decides nothing; see the package `scaling`."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from .forms import HttpUrl
from .sections import SpecSection

Mode = Literal["operator", "keda", "hpa", "none"]
NO_YIELD = "lowPriority Yield needs mode operator"


class TargetsSpec(SpecSection):
    drain_seconds: float = Field(30.0, gt=0, strict=False)
    """Seconds in which the engines should be able to work off what waits."""
    oldest_age_seconds: float = Field(10.0, gt=0, strict=False)
    """How long the oldest request may wait."""
    kv_utilization: float = Field(0.8, gt=0, le=1, strict=False)
    """Share of KV blocks in use, mean over the engines."""
    utilization: float = Field(0.7, gt=0, le=1, strict=False)
    """Running sequences over those that the engines can run at once."""
    tolerance: float = Field(0.1, ge=0, lt=1, strict=False)
    """Deviations from a target, as a share of it, that change nothing."""
    requests_per_engine: int = Field(32, ge=1)
    """Waiting and running requests of one engine: the target of modes keda and hpa alone."""


class ObjectiveSpec(SpecSection):
    cel: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "has(self.ttftSeconds) || has(self.tpotSeconds)",
            "set ttftSeconds, tpotSeconds or both",
        ),
    )
    ttft_seconds: float | None = Field(None, gt=0, strict=False)
    """Seconds from a request's admission to its first token."""
    tpot_seconds: float | None = Field(None, gt=0, strict=False)
    """Mean seconds per output token after the first."""
    percentile: float = Field(99.0, ge=50, le=99.9, strict=False)
    """Share of the requests, in per cent, that are to be as fast."""

    @model_validator(mode="after")
    def _one(self) -> "ObjectiveSpec":
        if self.ttft_seconds is None and self.tpot_seconds is None:
            raise ValueError(self.cel[0][1])
        return self


class BehaviorPolicySpec(SpecSection):
    type: Literal["Pods", "Percent"]
    """Whether value counts engines or per cent of them."""
    value: int = Field(ge=1)
    """Largest change within the period."""
    period_seconds: int = Field(ge=1, le=1800)
    """Length of the period."""


class BehaviorRulesSpec(SpecSection):
    stabilization_window_seconds: int | None = Field(None, ge=0, le=3600)
    """Looks back so long and takes the most careful of the wanted numbers."""
    select_policy: Literal["Max", "Min", "Disabled"] = "Max"
    """Which of several policies counts; Disabled never moves in this direction."""
    policies: tuple[BehaviorPolicySpec, ...] = Field((), strict=False)
    """Step limits; the mode's defaults where empty."""


class BehaviorSpec(SpecSection):
    scale_up: BehaviorRulesSpec = BehaviorRulesSpec()
    """Default: no window, twice the engines or 4 more in 15 s, whichever is more."""
    scale_down: BehaviorRulesSpec = BehaviorRulesSpec()
    """Default: a window as long as a start is measured to take, 45 to 300 s (keda and hpa:
    300 s); a quarter of the engines or 1 in 60 s, whichever is more."""


class ForecastSpec(SpecSection):
    enabled: bool = False
    """Scale ahead of load that recurs every day."""
    days: int = Field(7, ge=1, le=28)
    """How many days are remembered, from the operator's start on."""
    lead_seconds: int = Field(60, ge=0, le=7200)
    """How long before they are needed engines are ready, beyond the measured cold start."""


class ScalingSpec(SpecSection):
    cel: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "(has(self.minReplicas) ? self.minReplicas : 1) "
            "<= (has(self.maxReplicas) ? self.maxReplicas : 1)",
            "minReplicas must not be above maxReplicas",
        ),
        (
            "!has(self.mode) || self.mode != 'hpa' || !has(self.minReplicas) "
            "|| self.minReplicas > 0",
            "a HorizontalPodAutoscaler cannot scale to zero: minReplicas must be above 0, "
            "or mode operator or keda",
        ),
        (
            "!has(self.objective) || !has(self.targets) || !has(self.targets.utilization)",
            "the objective decides the utilization: set objective or targets.utilization",
        ),
        (
            "!has(self.objective) || !has(self.mode) || self.mode == 'operator'",
            "objective needs mode operator",
        ),
        (
            "!has(self.lowPriority) || self.lowPriority != 'Yield' || !has(self.mode) "
            "|| self.mode == 'operator'",
            NO_YIELD,
        ),
    )
    mode: Mode = "operator"
    """Who decides: operator, keda or hpa (their objects are made and set spec.replicas), or none
    (you set spec.replicas)."""
    min_replicas: int = Field(1, ge=0, le=1000)
    """Fewest engines. 0: none while there are no requests; requests wait for the first one to
    start."""
    max_replicas: int = Field(1, ge=1, le=1000)
    """Most engines."""
    idle_seconds: int = Field(600, ge=1, le=86400)
    """How long there must be no work before the last engine goes."""
    stale_seconds: int = Field(60, ge=5, le=3600)
    """Metrics older than this change nothing."""
    cold_start_seconds: int = Field(120, ge=1, le=86400)
    """First guess of how long an engine takes to start, until it has been measured."""
    objective: ObjectiveSpec | None = None
    """Latencies that decide the engines' utilization, instead of targets.utilization."""
    low_priority: Literal["Scale", "Yield"] = "Scale"
    """Scale: requests of low priority, such as those of batches, ask for engines like all others.
    Yield: they use what is free, up to targets.utilization of each engine, and ask for engines only
    when they are due. A change restarts engines."""
    targets: TargetsSpec = TargetsSpec()
    """The targets that decide the number of engines."""
    behavior: BehaviorSpec = BehaviorSpec()
    """How fast it may change, as in a HorizontalPodAutoscaler."""
    forecast: ForecastSpec = ForecastSpec()
    """Ahead of recurring load."""
    prometheus_url: HttpUrl | None = None
    """Prometheus to read signals from; the operator's where absent, else the pods are scraped. The
    operator asks it, and may be set to allow some only."""

    @model_validator(mode="after")
    def _bounds(self) -> "ScalingSpec":
        if self.min_replicas > self.max_replicas:
            raise ValueError(self.cel[0][1])
        if self.mode == "hpa" and self.min_replicas == 0:
            raise ValueError(self.cel[1][1])
        if self.objective is not None and "utilization" in self.targets.model_fields_set:
            raise ValueError(self.cel[2][1])
        if self.objective is not None and self.mode != "operator":
            raise ValueError(self.cel[3][1])
        if self.low_priority == "Yield" and self.mode != "operator":
            raise ValueError(NO_YIELD)
        return self
