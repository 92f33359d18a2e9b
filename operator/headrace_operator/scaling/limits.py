"""Stabilization windows and step limits, as in HPA v2's `behavior`."""

from math import ceil

from .history import TimedCount
from .policy import ScalingRules, StepKind


def stabilized(
    wanted: int, current: int, highest: tuple[TimedCount, ...], lowest: tuple[TimedCount, ...]
) -> int:
    """The count after the stabilization windows.

    It rises at most to the lowest recommendation of the scale-up window (`lowest`), and falls at
    most to the highest one of the scale-down window (`highest`). Both windows hold `wanted` as
    their newest recommendation.
    """
    if wanted > current:
        return max(current, min(recommendation for _, recommendation in lowest))
    return min(current, max(recommendation for _, recommendation in highest))


def highest_allowed(
    current: int, rules: ScalingRules, changes: tuple[TimedCount, ...], now: float
) -> int | None:
    """The count that the step limits of scaling up allow; None means no limit."""
    if rules.select_policy == "Disabled":
        return current
    allowed = []
    for limit in rules.policies:
        start = current - _changed(changes, 1, limit.period, now)
        if limit.kind is StepKind.PODS:
            allowed.append(start + limit.value)
        else:
            allowed.append(ceil(start * (1 + limit.value / 100)))
    return max(current, _select(rules, allowed, most=True)) if allowed else None


def lowest_allowed(
    current: int, rules: ScalingRules, changes: tuple[TimedCount, ...], now: float
) -> int | None:
    """The count that the step limits of scaling down allow; None means no limit."""
    if rules.select_policy == "Disabled":
        return current
    allowed = []
    for limit in rules.policies:
        start = current - _changed(changes, -1, limit.period, now)
        if limit.kind is StepKind.PODS:
            allowed.append(start - limit.value)
        else:
            allowed.append(int(start * (1 - limit.value / 100)))
    return min(current, max(0, _select(rules, allowed, most=False))) if allowed else None


def _changed(changes: tuple[TimedCount, ...], sign: int, period: float, now: float) -> int:
    """Returns the sum of the changes with this sign within the period."""
    return sum(by for at, by in changes if by * sign > 0 and now - at < period)


def _select(rules: ScalingRules, allowed: list[int], *, most: bool) -> int:
    generous = rules.select_policy == "Max"
    return max(allowed) if generous == most else min(allowed)
