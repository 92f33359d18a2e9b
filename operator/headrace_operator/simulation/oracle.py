"""The cheapest fleet for a trace that is known beforehand: a plan to follow, and a lower bound.

The plan starts from the sequences that would run at each moment if no request waited. Engines at a
given fullness must be able to run them all. Each engine that the plan adds is started one cold
start ahead, and an idle engine is kept if that is shorter than starting it again. The highest
fullness with which the simulated fleet still meets the objectives is the plan that counts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .engine_profile import EngineProfile
from .errors import SimulationError
from .result import Objectives, SimulationResult
from .workload import Trace

GOAL = 0.99
"""The share of requests that must meet the objectives."""
SLOT = 5.0
"""Seconds between two changes of the plan."""
BOUND_WINDOW = 3600.0
"""Seconds of a window for which the lower bound counts work."""
FULLNESS = tuple(round(0.4 + 0.05 * step, 2) for step in range(17))
"""The shares of an engine's sequences that the plan tries, above 1 with requests that wait."""

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Engines wanted from each moment on, as (time, count), for a `fullness` of the engines."""

    fullness: float
    counts: tuple[tuple[float, int], ...]

    @property
    def first(self) -> int:
        return self.counts[0][1]


def cheapest(
    trace: Trace,
    profile: EngineProfile,
    least: int,
    follow: Callable[[Plan], SimulationResult],
    goal: float = GOAL,
) -> tuple[Plan, SimulationResult]:
    """The plan with the fullest engines that meets the goal, and its run.

    `follow` simulates a plan; `least` engines are always there. The search assumes that fuller
    engines meet the objectives less often. Raises SimulationError if no plan meets the goal.
    """
    found: tuple[Plan, SimulationResult] | None = None
    low, high = 0, len(FULLNESS) - 1
    while low <= high:
        middle = (low + high) // 2
        plan = plan_for(trace, profile, FULLNESS[middle], least)
        result = follow(plan)
        if result.attainment >= goal:
            found, low = (plan, result), middle + 1
        else:
            high = middle - 1
    if found is None:
        raise SimulationError(
            f"--oracle: no fleet meets the objectives for {goal:.0%} of the requests; relax them"
        )
    return found


def plan_for(trace: Trace, profile: EngineProfile, fullness: float, least: int) -> Plan:
    """The cheapest counts with which running sequences never exceed `fullness`."""
    needed = np.maximum(least, _needed(trace, profile, fullness))
    kept = _without_short_gaps(needed, profile.cold_start_seconds + _answer(trace, profile))
    ahead = round(profile.cold_start_seconds / SLOT) + 2
    wanted = _highest_ahead(kept, ahead)
    changes = np.flatnonzero(np.diff(wanted, prepend=-1))
    counts = tuple((float(slot * SLOT), int(wanted[slot])) for slot in changes)
    return Plan(fullness=fullness, counts=counts)


def lower_bound(
    trace: Trace,
    profile: EngineProfile,
    objectives: Objectives,
    least: int,
    goal: float = GOAL,
) -> float:
    """GPU-hours that every fleet costs that meets the objectives for a share `goal` of requests.

    A request costs at least its prompt's time at full prefill speed, and for each further token its
    part of the step that is shared best. Work counts in a window of an hour if the request arrives
    in it and must end in it to meet the objectives; `least` engines are always there. Whatever the
    other requests are, they take at most the work of the largest ones.
    """
    steps = np.array(profile.step_seconds()[1:])
    token = float(np.min(steps / np.arange(1, len(steps) + 1)))
    later = np.maximum(0, trace.outputs - 1)
    work = trace.prompts / profile.prefill_tokens_per_second + later * token
    latest = (
        trace.arrivals + objectives.time_to_first_token + later * objectives.time_per_output_token
    )
    window = (trace.arrivals // BOUND_WINDOW).astype(np.int64)
    ends = np.minimum((window + 1) * BOUND_WINDOW, trace.seconds)
    forced = np.bincount(window, weights=np.where(latest <= ends, work, 0.0))
    lengths = np.diff(np.append(np.arange(len(forced)) * BOUND_WINDOW, trace.seconds))
    spared = np.sort(work)[::-1][: int((1 - goal) * len(trace))].sum()
    seconds = np.maximum(forced, least * lengths).sum() - spared
    return max(float(seconds), least * trace.seconds) / 3600 * profile.gpus


def _decode_seconds(trace: Trace, profile: EngineProfile, fullness: float) -> float:
    """Seconds between two tokens of a sequence, including the prompts that are computed between
    them."""
    running = max(1, round(min(1.0, fullness) * profile.max_num_seqs))
    prompt, output = float(trace.prompts.mean()), float(trace.outputs.mean())
    rate = profile.requests_per_second(min(1.0, fullness), prompt, output)
    prefilling = min(0.9, rate * prompt / profile.prefill_tokens_per_second)
    return profile.step_seconds()[running] / (1 - prefilling)


def _answer(trace: Trace, profile: EngineProfile) -> float:
    """Seconds that a draining engine needs for its requests, about."""
    return float(trace.outputs.mean()) * _decode_seconds(trace, profile, 1.0)


def _needed(trace: Trace, profile: EngineProfile, fullness: float) -> Counts:
    """Engines for each slot that run all sequences of the slot, in sequences and in KV."""
    lasts = trace.prompts / profile.prefill_tokens_per_second
    lasts = lasts + trace.outputs * _decode_seconds(trace, profile, fullness)
    slots = int(trace.seconds // SLOT) + 1
    sequences = _most_at_once(trace, lasts, np.ones(len(trace)), slots)
    tokens = _most_at_once(trace, lasts, (trace.prompts + trace.outputs).astype(float), slots)
    engines = np.maximum(sequences / profile.max_num_seqs, tokens / profile.kv_tokens)
    return np.ceil(engines / fullness - 1e-9).astype(np.int64)


def _most_at_once(
    trace: Trace, lasts: NDArray[np.float64], weights: NDArray[np.float64], slots: int
) -> NDArray[np.float64]:
    """The highest sum of the weights of running requests in each slot."""
    times = np.concatenate((trace.arrivals, trace.arrivals + lasts))
    order = np.argsort(times, kind="stable")
    running = np.cumsum(np.concatenate((weights, -weights))[order])
    slot = (times[order] // SLOT).astype(np.int64)
    kept = slot < slots
    most = np.zeros(slots)
    np.maximum.at(most, slot[kept], running[kept])
    # What runs as a slot begins counts in it, too.
    last = np.searchsorted(times[order], np.arange(1, slots) * SLOT, side="left") - 1
    most[1:] = np.maximum(most[1:], np.where(last >= 0, running[last], 0.0))
    return most


def _without_short_gaps(needed: Counts, longest: float) -> Counts:
    """Keeps each engine through a gap that is shorter than `longest` seconds.

    An engine costs the gap if it is kept and `longest` if it is started again. Engines are counted
    from below, so each number of engines is decided by itself, and together they are the optimum.
    """
    kept = needed.copy()
    for level in range(1, int(needed.max()) + 1):
        used = np.flatnonzero(needed >= level)
        for before, after in zip(used[:-1], used[1:], strict=True):
            if 1 < after - before and (after - before - 1) * SLOT < longest:
                gap = slice(before + 1, after)
                kept[gap] = np.maximum(kept[gap], level)
    return kept


def _highest_ahead(counts: Counts, slots: int) -> Counts:
    """The highest count from each slot until `slots` later."""
    padded = np.append(counts, np.full(slots, counts[-1]))
    highest: Counts = np.lib.stride_tricks.sliding_window_view(padded, slots + 1).max(axis=1)
    return highest
