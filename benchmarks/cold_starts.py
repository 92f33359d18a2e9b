"""What engines that start faster save: Headrace's policy beside the oracle, over start times.

    python benchmarks/cold_starts.py [--starts 5,10,20,40,60,90] [--bursts 0.4,0.8]
        [--seeds 201-220] [--oracle 3] [--utilization 0.6] [--window 300] [--out FILE]

The traces are days of six hours with two bursts. Each row has means over the seeds and the lowest
share of objectives met. GPU-hours are divided by those of the oracle, which knows the same trace
and has the same start time, for the first `--oracle` seeds; the oracle is the slow part.
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
                ours, peak = comparison.run(("headrace", "peak"))
                oracle = comparison.oracle().gpu_hours if place < options.oracle else None
                yield Run(
                    start, burst, seed, ours.attainment, ours.gpu_hours, peak.attainment, oracle
                )


def table(found: list[Run]) -> Iterator[str]:
    yield "| start | bursts | SLO met | lowest | below the fixed peak | of the oracle's GPU-hours |"
    yield "| ---: | ---: | ---: | ---: | ---: | ---: |"
    for start in dict.fromkeys(run.start for run in found):
        for burst in dict.fromkeys(run.burst for run in found):
            some = [run for run in found if (run.start, run.burst) == (start, burst)]
            met = [run.attainment for run in some]
            below = max(run.peak - run.attainment for run in some) * 100
            ratios = [run.hours / run.oracle_hours for run in some if run.oracle_hours is not None]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"
            cells = (f"{start:g} s", f"{burst:g}", f"{mean(met):.2%}", f"{min(met):.2%}")
            yield f"| {' | '.join(cells)} | {below:.2f} points | {spread} |"


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
