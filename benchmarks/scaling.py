"""Measures how the cost of each part grows, and draws it.

    python benchmarks/scaling.py [--only PART ...] [--most N] [--json FILE] [--png FILE]

Real processes on this machine: an engine on the CPU, a gateway, Valkey with its append-only file,
engines that only emit. CPU figures are the processes' own; latencies need an idle machine. `--most`
bounds all sizes (streams, requests, engines); without it a million requests wait, and Valkey takes
some gigabytes. A curve's exponent is the steepest growth over a factor of four in size; that of
linear growth is 1.
"""

import argparse
import json
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.table import Table

from growth import engine, frames, gateway, redis_queue
from growth.curve import Curve, curve_of
from growth.plot import draw
from peers import machine

PARTS = {
    "steps": engine.steps,
    "plans": engine.plans,
    "tokens": gateway.tokens,
    "answers": gateway.answers,
    "idle": gateway.idle,
    "waiting": redis_queue.waiting,
    "engines": redis_queue.engines,
    "frames": frames.frames,
    "frame": frames.frame,
    "shards": redis_queue.shards,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
                        help=f"of {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--most", type=int, default=10**6, help="no size is larger")
    parser.add_argument("--seconds", type=float, default=5.0, help="of what is watched for a time")
    parser.add_argument("--json", type=Path, help="file for the curves; what it has stays")
    parser.add_argument("--png", type=Path, help="file for the picture")
    return parser.parse_args()


def table(curve: Curve) -> Table:
    found = Table(curve.size, f"{curve.cost} ({curve.unit})", title=curve.name)
    for size, cost in curve.points:
        found.add_row(f"{size:,}", f"{cost:,.4g}")
    exponent = "" if curve.exponent is None else f"exponent {curve.exponent:.2f}: {curve.verdict}"
    found.caption = exponent
    return found


def main() -> None:
    options = arguments()
    console = Console(width=100)
    curves: dict[str, Curve] = {}
    if options.json is not None and options.json.exists():
        known = json.loads(options.json.read_text())["curves"]
        curves = {curve["name"]: curve_of(curve) for curve in known}
    for part in options.only:
        for curve in PARTS[part](options.most, options.seconds):
            curves[curve.name] = curve
            console.print(table(curve))
        if options.json is not None:
            report = {
                "date": date.today().isoformat(),
                "machine": machine(),
                "curves": [curve.report() for curve in curves.values()],
            }
            options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    if options.png is not None:
        draw(list(curves.values()), options.png)


if __name__ == "__main__":
    main()
