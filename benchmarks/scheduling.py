"""Batching and policies compared in virtual time, with the engine's own scheduler.

    python benchmarks/scheduling.py [--profile FILE] [--requests 1000] [--json FILE] [--plots docs]

The scheduler, its KV blocks and its policies are the engine's; the duration of a step comes from a
cost model, which benchmarks/calibrate.py measures. So a run of hours takes seconds and is
reproducible.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace_operator.simulation.engine_profile import load_profile
from virtual_time.comparison import Comparison

PROFILE = Path(__file__).parent / "profiles" / "llama-42m-2-cores.json"

# Heading, the figure's name in a run's summary, and its format.
Column = tuple[str, str, str]
COMMON: tuple[Column, ...] = (
    ("tokens/s", "output_tokens_per_second", "{:,.0f}"),
    ("TTFT p50", "ttft_ms_p50", "{:,.0f} ms"),
    ("p99", "ttft_ms_p99", "{:,.0f} ms"),
    ("ITL p50", "itl_ms_p50", "{:,.1f} ms"),
    ("p99", "itl_ms_p99", "{:,.1f} ms"),
    ("latency", "latency_mean_ms", "{:,.0f} ms"),
    ("padding", "padding_share", "{:.1%}"),
    ("KV waste", "kv_waste", "{:.1%}"),
    ("Jain", "fairness", "{:.3f}"),
)
POLICY: tuple[Column, ...] = (
    *COMMON,
    ("urgent p99", "urgent_ttft_ms_p99", "{:,.0f} ms"),
    ("completed", "completed", "{:.1%}"),
    ("in time", "deadlines_met", "{:.1%}"),
    ("preempted", "preemptions", "{:,.0f}"),
)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", type=Path, default=PROFILE, help="of benchmarks/calibrate.py")
    parser.add_argument("--requests", type=int, default=1000, help="in each run")
    parser.add_argument("--chunk", type=int, default=256, help="tokens a step, chunked prefill")
    parser.add_argument("--load", type=float, default=0.7, help="of capacity, batchings compared")
    parser.add_argument("--overload", type=float, default=1.5, help="the same, policies compared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--plots", type=Path, help="folder for the pictures")
    return parser.parse_args(given)


def table(
    title: str, runs: Mapping[str, Mapping[str, float]], columns: tuple[Column, ...]
) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column("")
    for heading, _, _ in columns:
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, figures in runs.items():
        cells = (form.format(figures.get(figure, 0.0)) for _, figure, form in columns)
        shown.add_row(name, *cells)
    return shown


def show(results: Mapping[str, Any], console: Console) -> None:
    for outputs, waste in results["static_waste"].items():
        console.print(f"Static batch with outputs of {outputs} tokens: {waste:.0%} of it is waste.")
    gain = results["continuous_gain"]
    console.print(
        f"{gain['requests']:,} requests of {gain['output_tokens']} output tokens, all at once: "
        f"continuous batching does {gain['over_static']:.2f} times the tokens/s of static batching."
    )
    batching, policies = results["batching"], results["policies"]
    console.print(table(f"Batching, {batching['load']:.0%} load", batching["runs"], COMMON))
    console.print(table(f"Policies, {policies['load']:.0%} load", policies["runs"], POLICY))


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    comparison = Comparison(
        profile=load_profile(options.profile),
        requests=options.requests,
        chunk=options.chunk,
        load=options.load,
        overload=options.overload,
        seed=options.seed,
    )
    results = comparison.results()
    show(results, Console(width=190))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.plots is not None:
        from virtual_time.plots import draw

        for path in draw(results, options.plots):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
