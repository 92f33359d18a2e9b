"""Converts the scaling section of a spec to the policy for `decide`."""

from dataclasses import replace

from ..scaling.policy import (
    DEFAULT_DOWN,
    DEFAULT_UP,
    Forecast,
    Objective,
    ScalingPolicy,
    ScalingRules,
    StepKind,
    StepLimit,
)
from .scaling_section import BehaviorRulesSpec, ScalingSpec


def scaling_policy(spec: ScalingSpec) -> ScalingPolicy:
    """The policy of a spec; it exists for every parsed spec, as the schema has the same bounds."""
    targets, forecast, objective = spec.targets, spec.forecast, spec.objective
    return ScalingPolicy(
        min_replicas=spec.min_replicas,
        max_replicas=spec.max_replicas,
        drain_time=targets.drain_seconds,
        max_age=targets.oldest_age_seconds,
        utilization=targets.utilization,
        objective=None
        if objective is None
        else Objective(
            time_to_first_token=objective.ttft_seconds,
            time_per_output_token=objective.tpot_seconds,
            percentile=objective.percentile / 100,
        ),
        kv_utilization=targets.kv_utilization,
        tolerance=targets.tolerance,
        idle_time=spec.idle_seconds,
        stale_after=spec.stale_seconds,
        low_priority_yields=spec.low_priority == "Yield",
        cold_start=spec.cold_start_seconds,
        scale_up=_rules(spec.behavior.scale_up, DEFAULT_UP),
        scale_down=_rules(spec.behavior.scale_down, DEFAULT_DOWN),
        forecast=Forecast(days=forecast.days, lead=forecast.lead_seconds)
        if forecast.enabled
        else None,
    )


def _rules(wanted: BehaviorRulesSpec, default: ScalingRules) -> ScalingRules:
    """The rules of one direction; fields that the spec leaves out keep their defaults."""
    rules = replace(default, select_policy=wanted.select_policy)
    if wanted.stabilization_window_seconds is not None:
        rules = replace(rules, stabilization_window=wanted.stabilization_window_seconds)
    if wanted.policies:
        steps = tuple(
            StepLimit(StepKind(step.type), step.value, step.period_seconds)
            for step in wanted.policies
        )
        rules = replace(rules, policies=steps)
    return rules
