"""What engines that start faster save: HPA, KEDA and Headrace beside the oracle, over start times.

    python benchmarks/cold_starts.py [--starts 5,10,20,40,60,90] [--bursts 0.4,0.8]
        [--seeds 201-220] [--oracle 3] [--utilization 0.7] [--window 300] [--percentile 99]
        [--each] [--jobs 1] [--out FILE]

The traces are days of six hours with two bursts. Each row has means over the seeds, the lowest
share of objectives met, and the largest distance from the fixed peak. GPU-hours are divided by
those of the oracle, which knows the same trace and has the same start time, for the first
`--oracle` seeds; the oracle is the slow part. With `--percentile`, there is also a Headrace whose
engines follow the objectives at this percentile. `--each` also prints a row for each trace: share
of objectives met and GPU-hours.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

from headrace_common.protocol.base import QueueLimits
from headrace_operator.scaling import Objective, ScalingPolicy
from headrace_operator.simulation.comparison import Comparison, with_room_to_scale
from headrace_operator.simulation.engine_profile import load_profile
from headrace_operator.simulation.result import Objectives
from headrace_operator.simulation.workload import DAY, Diurnal, diurnal

OWN = "Headrace"


@dataclass(frozen=True, slots=True)
class Run:
    """One trace: shares of objectives met, GPU-hours; None for what was not simulated."""

    start: float
    burst: float
    seed: int
    policy: str
    attainment: float
    hours: float
    peak: float
    oracle_hours: float | None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=numbers, default=[5.0, 10.0, 20.0, 40.0, 60.0, 90.0])
    parser.add_argument("--bursts", type=numbers, default=[0.4, 0.8])
    parser.add_argument("--seeds", type=span, default=range(201, 221), help="as 201-220")
    parser.add_argument("--oracle", type=int, default=3, help="seeds with an oracle")
    parser.add_argument("--utilization", type=float, default=ScalingPolicy().utilization)
    parser.add_argument("--window", type=float, help="seconds before it scales down")
    parser.add_argument("--percentile", type=float, help="add a Headrace with this objective")
    parser.add_argument("--each", action="store_true", help="also print a row for each trace")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="JSON file for the single runs")
    return parser.parse_args()


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def span(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def wanted_policy(options: argparse.Namespace) -> ScalingPolicy:
    wanted = ScalingPolicy(utilization=options.utilization)
    if options.window is None:
        return wanted
    down = replace(wanted.scale_down, stabilization_window=options.window)
    return replace(wanted, scale_down=down)


def runs(options: argparse.Namespace) -> Iterator[Run]:
    wanted = wanted_policy(options)
    with ProcessPoolExecutor(options.jobs) as pool:
        waiting = [
            pool.submit(
                compare,
                wanted,
                start,
                burst,
                seed,
                percentile=options.percentile,
                with_oracle=place < options.oracle,
            )
            for burst in options.bursts
            for place, seed in enumerate(options.seeds)
            for start in options.starts
        ]
        for each in waiting:
            yield from each.result()


def compare(
    wanted: ScalingPolicy,
    start: float,
    burst: float,
    seed: int,
    *,
    percentile: float | None,
    with_oracle: bool,
) -> list[Run]:
    """The runs of one trace."""
    trace = diurnal(Diurnal(seconds=DAY / 4, day=DAY / 4, bursts=2, burst=burst, seed=seed))
    profile = replace(load_profile(None), cold_start_seconds=start)
    comparison = Comparison(
        trace=trace,
        profile=profile,
        policy=with_room_to_scale(trace, profile, wanted),
        objectives=Objectives(),
        limits=QueueLimits(),
    )
    peak, *others = comparison.run(("peak", "hpa", "keda", "headrace"))
    found = [(each.name, each) for each in others]
    if percentile is not None:
        goals = Objectives()
        objective = Objective(
            time_to_first_token=goals.time_to_first_token,
            time_per_output_token=goals.time_per_output_token,
            percentile=percentile / 100,
        )
        by_objective = replace(comparison, policy=replace(comparison.policy, objective=objective))
        (result,) = by_objective.run(("headrace",))
        found.append((f"Headrace, {percentile:g} %", result))
    oracle = comparison.oracle().gpu_hours if with_oracle else None
    return [
        Run(start, burst, seed, name, each.attainment, each.gpu_hours, peak.attainment, oracle)
        for name, each in found
    ]


def each_trace(found: list[Run]) -> Iterator[str]:
    """A row for each trace, and how often Headrace is better than the other policies."""
    names = list(dict.fromkeys(run.policy for run in found))
    heads = ("start", "bursts", "seed", "fixed peak", *names, "oracle", "of the oracle's")
    yield f"| {' | '.join(heads)} |"
    yield f"|{' ---: |' * len(heads)}"
    traces: dict[tuple[float, float, int], list[Run]] = {}
    for run in found:
        traces.setdefault((run.start, run.burst, run.seed), []).append(run)
    for (start, burst, seed), some in traces.items():
        cells = [f"{start:g} s", f"{burst:g}", str(seed), f"{some[0].peak:.3%}"]
        cells += [f"{run.attainment:.3%} / {run.hours:.2f}" for run in some]
        oracle, own = some[0].oracle_hours, some[names.index(OWN)].hours
        cells += ["-", "-"] if oracle is None else [f"{oracle:.2f}", f"{own / oracle:.3f}"]
        yield f"| {' | '.join(cells)} |"
    yield ""
    for name in names[: names.index(OWN)]:
        pairs = [(some[names.index(name)], some[names.index(OWN)]) for some in traces.values()]
        cheaper = sum(own.hours < other.hours for other, own in pairs)
        oftener = sum(own.attainment >= other.attainment for other, own in pairs)
        both = sum(
            own.hours < other.hours and own.attainment >= other.attainment for other, own in pairs
        )
        yield (
            f"Of {len(pairs)} traces {OWN} costs less than {name} on {cheaper}, meets the "
            f"objectives at least as often on {oftener}, and both on {both}."
        )
    yield ""


def table(found: list[Run]) -> Iterator[str]:
    heads = ("start", "bursts", "policy", "SLO met", "lowest", "below the fixed peak", "GPU-hours")
    yield f"| {' | '.join(heads)} | of the oracle's |"
    yield "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |"
    for key in dict.fromkeys((run.start, run.burst, run.policy) for run in found):
        some = [run for run in found if (run.start, run.burst, run.policy) == key]
        met = [run.attainment for run in some]
        below = max(run.peak - run.attainment for run in some) * 100
        ratios = [run.hours / run.oracle_hours for run in some if run.oracle_hours is not None]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"
        start, burst, policy = key
        hours = mean(run.hours for run in some)
        cells = f"{start:g} s | {burst:g} | {policy} | {mean(met):.2%} | {min(met):.2%}"
        yield f"| {cells} | {below:.2f} points | {hours:.1f} | {spread} |"


def main() -> None:
    options = arguments()
    found = []
    for run in runs(options):
        found.append(run)
        sys.stderr.write(f"{run}\n")
    rows = [*each_trace(found), *table(found)] if options.each else table(found)
    sys.stdout.write("\n".join(rows) + "\n")
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(run) for run in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
