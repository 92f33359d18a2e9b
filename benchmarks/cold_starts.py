"""What engines that start faster save: HPA, KEDA and Headrace beside the oracle, over start times.

    python benchmarks/cold_starts.py [--starts 5,10,20,40,60,90] [--bursts 0.4,0.8]
        [--seeds 201-220] [--oracle 3] [--utilization 0.7] [--window 300] [--out FILE]

The traces are days of six hours with two bursts. Each row has means over the seeds, the lowest
share of objectives met, and the largest distance from the fixed peak. GPU-hours are divided by
those of the oracle, which knows the same trace and has the same start time, for the first
`--oracle` seeds; the oracle is the slow part.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

from headrace_common.protocol.base import QueueLimits
from headrace_operator.scaling import ScalingPolicy
from headrace_operator.simulation.comparison import Comparison, with_room_to_scale
from headrace_operator.simulation.engine_profile import load_profile
from headrace_operator.simulation.result import Objectives
from headrace_operator.simulation.workload import DAY, Diurnal, diurnal


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
    parser.add_argument("--out", type=Path, help="JSON file for the single runs")
    return parser.parse_args()


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def span(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def runs(options: argparse.Namespace) -> Iterator[Run]:
    wanted = ScalingPolicy(utilization=options.utilization)
    if options.window is not None:
        down = replace(wanted.scale_down, stabilization_window=options.window)
        wanted = replace(wanted, scale_down=down)
    for burst in options.bursts:
        for place, seed in enumerate(options.seeds):
            trace = diurnal(Diurnal(seconds=DAY / 4, day=DAY / 4, bursts=2, burst=burst, seed=seed))
            for start in options.starts:
                profile = replace(load_profile(None), cold_start_seconds=start)
                comparison = Comparison(
                    trace=trace,
                    profile=profile,
                    policy=with_room_to_scale(trace, profile, wanted),
                    objectives=Objectives(),
                    limits=QueueLimits(),
                )
                peak, *others = comparison.run(("peak", "hpa", "keda", "headrace"))
                oracle = comparison.oracle().gpu_hours if place < options.oracle else None
                for each in others:
                    met = each.attainment, each.gpu_hours, peak.attainment
                    yield Run(start, burst, seed, each.name, *met, oracle)


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
    sys.stdout.write("\n".join(table(found)) + "\n")
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(run) for run in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
