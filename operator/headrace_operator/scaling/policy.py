"""The scaling policy of a model: bounds, targets, speeds. Times are in seconds."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal


class PolicyError(ValueError):
    """A value of a policy is out of range; the text names field, value and what is allowed."""


SHORTEST_WINDOW = 45.0
"""Bounds in seconds of the derived window for scaling down; at least as long as speeds and arrivals
are smoothed over."""
LONGEST_WINDOW = 300.0


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise PolicyError(f"{name}: {value} is out of range; it must be {allowed}")


class StepKind(StrEnum):
    PODS = "Pods"
    PERCENT = "Percent"


@dataclass(frozen=True, slots=True)
class StepLimit:
    """At most `value` pods, or percent of the count at its start, within any `period`."""

    kind: StepKind
    value: int
    period: float

    def __post_init__(self) -> None:
        _require(self.value > 0, "value", self.value, "above 0")
        _require(self.period > 0, "period", self.period, "above 0")


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """One direction of HPA v2's `behavior`, with its meaning.

    `Max` allows what the most generous limit allows, `Min` the strictest, `Disabled` nothing. The
    count moves only as far as every recommendation of the last `stabilization_window` allows; None
    derives the window from the cold start, for scaling down.
    """

    stabilization_window: float | None
    policies: tuple[StepLimit, ...] = ()
    select_policy: Literal["Max", "Min", "Disabled"] = "Max"

    def __post_init__(self) -> None:
        _require(0 <= self.window <= 3600, "stabilization_window", self.window, "0 to 3600")

    @property
    def window(self) -> float:
        """The stabilization window in seconds; 0 until it is derived."""
        return self.stabilization_window or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Scale ahead of load that earlier days had at the same time of day.

    `days` of memory; the same weekday counts as much as all other days together. Replicas are ready
    `lead` seconds before they are needed, on top of the learned cold start.
    """

    days: int = 7
    lead: float = 60.0

    def __post_init__(self) -> None:
        _require(1 <= self.days <= 28, "days", self.days, "1 to 28")
        _require(self.lead >= 0, "lead", self.lead, "at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Latencies in seconds that a share `percentile` of the requests is to meet.

    None: no objective of this kind.
    """

    time_to_first_token: float | None = None
    time_per_output_token: float | None = None
    percentile: float = 0.99

    def __post_init__(self) -> None:
        for name in ("time_to_first_token", "time_per_output_token"):
            value = getattr(self, name)
            _require(value is None or value > 0, name, value, "above 0")
        _require(0 < self.percentile < 1, "percentile", self.percentile, "above 0, below 1")


DEFAULT_UP = ScalingRules(
    0.0, (StepLimit(StepKind.PERCENT, 100, 15.0), StepLimit(StepKind.PODS, 4, 15.0))
)
DEFAULT_DOWN = ScalingRules(
    None, (StepLimit(StepKind.PERCENT, 25, 60.0), StepLimit(StepKind.PODS, 1, 60.0))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPolicy:
    """Bounds and targets. `min_replicas` 0 allows scaling to zero after `idle_time`.

    `drain_time` is the longest that waiting work may take to be done, `max_age` the longest wait of
    one request. `utilization` is the target share of the engines' sequences that run; with an
    `objective`, it counts until speeds are known. `kv_utilization` is that of KV blocks in use.
    Deviations within `tolerance` change nothing. Metrics older than `stale_after` freeze the count.
    With `low_priority_yields`, requests of low priority ask for engines only when they are due.
    `cold_start` and `engine_requests_per_second` (of one engine at full load) are first guesses,
    replaced by what is measured.
    """

    min_replicas: int = 1
    max_replicas: int = 10
    drain_time: float = 30.0
    max_age: float = 10.0
    utilization: float = 0.7
    objective: Objective | None = None
    kv_utilization: float = 0.8
    tolerance: float = 0.1
    idle_time: float = 600.0
    stale_after: float = 60.0
    cold_start: float = 120.0
    engine_requests_per_second: float | None = None
    scale_up: ScalingRules = DEFAULT_UP
    scale_down: ScalingRules = DEFAULT_DOWN
    forecast: Forecast | None = None
    low_priority_yields: bool = False

    def __post_init__(self) -> None:
        lowest, highest = self.min_replicas, self.max_replicas
        _require(lowest >= 0, "min_replicas", lowest, "at least 0")
        _require(highest >= max(1, lowest), "max_replicas", highest, "at least 1 and min_replicas")
        for name in ("drain_time", "max_age", "stale_after", "cold_start", "idle_time"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name in ("utilization", "kv_utilization"):
            _require(0 < getattr(self, name) <= 1, name, getattr(self, name), "above 0, at most 1")
        _require(0 <= self.tolerance < 1, "tolerance", self.tolerance, "0 to below 1")
        rate = self.engine_requests_per_second
        _require(rate is None or rate > 0, "engine_requests_per_second", rate, "above 0")

    def for_cold_start(self, cold_start: float) -> "ScalingPolicy":
        """The policy with the window that depends on the seconds of a start.

        An engine that goes and is needed again costs nothing while it drains, since it is recalled,
        and a start after that. It is kept as long as a start takes: of all windows, this one costs
        least in the worst case, compared with knowing when the engine is needed.
        """
        if self.scale_down.stabilization_window is not None:
            return self
        window = min(LONGEST_WINDOW, max(SHORTEST_WINDOW, cold_start))
        return replace(self, scale_down=replace(self.scale_down, stabilization_window=window))

    def clamp(self, replicas: int) -> int:
        return min(self.max_replicas, max(self.min_replicas, replicas))
