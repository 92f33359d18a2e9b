"""Shows in virtual time from which prompt length on it pays to compute prompts on other engines.

    python benchmarks/disaggregated_prefill.py [--profile FILE] [--engines 4] [--load 0.6]

Chats with short prompts share a fleet with requests that have prompts of one length. Each row
compares the same arrivals on engines that do everything, and on as many engines of which some
compute the long prompts and hand them over. The scheduler is the engine's; the duration of a step
comes from a cost model, which benchmarks/calibrate.py measures. `copy` and `gap` are the costs of a
hand-over. Prints a Markdown table.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from headrace_cli.bench.arrivals import poisson
from headrace_cli.bench.workload import Range
from headrace_operator.simulation.engine_profile import EngineProfile, load_profile
from virtual_time.apart import Fleet, VirtualFleet
from virtual_time.jobs import Job
from virtual_time.measures import Log

PROFILE = Path(__file__).parent / "profiles" / "llama-42m-2-cores.json"
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
CHAT_PROMPTS, OUTPUTS = Range(32, 256), Range(50, 300)
# The sequences of a step whose seconds a request's output is counted with.
TYPICAL_BATCH = 8


def jobs_of(
    length: int, share: float, count: int, rate: float, seed: int
) -> tuple[list[Job], list[Job]]:
    """Chats, and requests with prompts of `length` tokens: `share` of all arrivals."""
    rng = random.Random(seed)
    kinds: tuple[list[Job], list[Job]] = ([], [])
    for number, at in zip(range(count), poisson(rng, rate), strict=False):
        is_long = rng.random() < share
        prompt = length if is_long else CHAT_PROMPTS.draw(rng)
        output = OUTPUTS.draw(rng)
        kinds[is_long].append(
            Job(
                name=f"r{number}",
                arrival=at,
                prompt=(2,) * prompt,
                output=output,
                max_tokens=output,
            )
        )
    return kinds


def seconds_of(profile: EngineProfile, prompt: float, output: float) -> float:
    """The seconds of an engine that a request takes, in a batch of usual size."""
    step = profile.step_seconds()[TYPICAL_BATCH] / TYPICAL_BATCH
    return prompt / profile.prefill_tokens_per_second + output * step


def rate_of(profile: EngineProfile, length: int, share: float) -> tuple[float, float]:
    """The requests per second of one busy engine, and the part of its time for long prompts."""
    output = (OUTPUTS.low + OUTPUTS.high) / 2
    chat = seconds_of(profile, (CHAT_PROMPTS.low + CHAT_PROMPTS.high) / 2, output)
    long = seconds_of(profile, length, output)
    mean = share * long + (1 - share) * chat
    return 1 / mean, share * seconds_of(profile, length, 0) / mean


def latencies(log: Log, jobs: Sequence[Job]) -> tuple[float, float, float]:
    """Milliseconds of these jobs: ITL p99, TTFT p50 and p99."""
    gaps = np.concatenate([np.diff(log.tokens[job.name]) for job in jobs])
    first = [log.tokens[job.name][0] - job.arrival for job in jobs]
    return (
        1000 * float(np.percentile(gaps, 99)),
        1000 * float(np.percentile(first, 50)),
        1000 * float(np.percentile(first, 99)),
    )


def row(profile: EngineProfile, length: int, given: argparse.Namespace) -> list[str]:
    rate, part = rate_of(profile, length, given.share)
    rate *= given.load * given.engines
    # Producers are busy with prompts for at most three quarters of the time.
    producers = max(1, min(given.engines - 1, round(given.load * part * given.engines / 0.75)))
    together = Fleet(engines=given.engines)
    apart = Fleet(
        engines=given.engines,
        producers=producers,
        local=min(length - 1, CHAT_PROMPTS.high),
        copy=given.copy,
        gap=given.gap,
    )
    rounds: list[list[tuple[float, float, float]]] = [[], [], [], []]
    for seed in range(given.seeds):
        chats, longs = jobs_of(length, given.share, given.requests, rate, seed)
        jobs = sorted([*chats, *longs], key=lambda job: job.arrival)
        for at, fleet in enumerate((together, apart)):
            log = VirtualFleet(profile, fleet, jobs).run()
            rounds[2 * at].append(latencies(log, chats))
            rounds[2 * at + 1].append(latencies(log, longs))
    means = [[fmean(values) for values in zip(*each, strict=True)] for each in rounds]
    cells = [f"{length:,}", f"{producers} of {given.engines}"]
    for kind in (0, 1):
        for figure in (0, 1, 2):
            before, after = means[kind][figure], means[kind + 2][figure]
            cells.append(f"{before:,.0f} -> {after:,.0f}")
    return cells


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", type=Path, default=PROFILE, help="of benchmarks/calibrate.py")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--load", type=float, default=0.6, help="of what all engines can do")
    parser.add_argument("--share", type=float, default=0.2, help="requests with a long prompt")
    parser.add_argument("--requests", type=int, default=1000, help="in each run")
    parser.add_argument("--seeds", type=int, default=3, help="runs, whose figures are averaged")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--copy", type=float, default=0.02, help="writing KV, of computing it")
    parser.add_argument("--gap", type=float, default=0.13, help="seconds of a hand-over besides")
    given = parser.parse_args(arguments)
    profile = load_profile(given.profile)
    print("| prompt tokens | producers | chats: ITL p99 | TTFT p50 | TTFT p99 ", end="")
    print("| long prompts: ITL p99 | TTFT p50 | TTFT p99 |")
    print("| ---: " * 8 + "|")
    for length in given.lengths:
        print("|", " | ".join(row(profile, length, given)), "|", flush=True)


if __name__ == "__main__":
    main()
