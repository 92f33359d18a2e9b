"""What an open page of the console costs, and how smoothly it draws.

    PYTHONPATH=tests/support python benchmarks/console_page.py [--rounds 5] [--sequences 64]

Starts `headrace up` with the demo model and loads it with `headrace bench`, in turns with and
without a page that shows the live view. The server's processes have the machine's first core; the
load and the browser have the others, as they are on other machines in production. Prints the ratios
of the pairs, in tokens a second and in processor time of the server's processes (which a noisy
machine disturbs less), and the frames that the browser drew a second. Needs Chromium
(`make system-packages`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from playwright.sync_api import Page
from rich.console import Console
from rich.table import Table

from headrace_testing.browser import chromium
from headrace_testing.headrace_up import UpProcess

# Keeps the time of every frame of the last run in `frames`, in milliseconds.
COUNT_FRAMES = """() => {
    window.frames = [];
    const each = now => { window.frames.push(now); requestAnimationFrame(each); };
    requestAnimationFrame(each);
}"""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: output tokens a second, and microseconds of the server's processors a token."""

    speed: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Pair:
    """One round: a run without and one with the page; frames a second of the page, and the longest
    time between two of the 99 % closest ones, in milliseconds."""

    alone: Run
    watched: Run
    frames: float
    gap_p99_ms: float


def load(up: UpProcess, options: argparse.Namespace, folder: Path) -> Run:
    report = folder / "report.json"
    command = [sys.executable, "-m", "headrace_cli", "bench", "--url", up.url, "--warmup", "0"]
    command += ["--concurrency", str(options.sequences), "--requests", str(options.requests)]
    command += ["--prompt-tokens", "16-64", "--output-tokens", "128-256", "--out", str(report)]
    before = cpu_seconds(up)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    spent = cpu_seconds(up) - before
    speed, seconds = (
        float(json.loads(report.read_text())[name])
        for name in ("output_tokens_per_s", "duration_s")
    )
    return Run(speed, 1e6 * spent / (speed * seconds))


def cpu_seconds(up: UpProcess) -> float:
    """Processor time that the server's processes have used."""
    times = [process.cpu_times() for process in up.children()]
    return sum(each.user + each.system for each in times)


def drawn(page: Page) -> tuple[float, float]:
    """Frames a second, and the 99th percentile of the time between two, in milliseconds."""
    times = page.evaluate("window.frames")
    gaps = sorted(later - earlier for earlier, later in zip(times, times[1:], strict=False))
    return 1000 * len(gaps) / (times[-1] - times[0]), gaps[len(gaps) * 99 // 100]


def pairs(options: argparse.Namespace, folder: Path) -> list[Pair]:
    first, *others = sorted(os.sched_getaffinity(0))
    found = []
    os.sched_setaffinity(0, {first})
    with UpProcess(folder, "--", "--max-num-seqs", str(options.sequences)) as up:
        os.sched_setaffinity(0, others or {first})
        up.until_served()
        with chromium() as browser:
            load(up, options, folder)
            for number in range(options.rounds):
                measured: dict[bool, Run] = {}
                frames = (0.0, 0.0)
                for watched in (number % 2 == 0, number % 2 == 1):
                    page = browser.new_page(viewport={"width": 1280, "height": 900})
                    if watched:
                        page.goto(f"{up.url}/#live")
                        page.locator(".engine").first.wait_for()
                        page.evaluate(COUNT_FRAMES)
                    measured[watched] = load(up, options, folder)
                    if watched:
                        frames = drawn(page)
                    page.close()
                found.append(Pair(measured[False], measured[True], *frames))
                print(f"round {number + 1}/{options.rounds}", flush=True)
    return found


def show(found: list[Pair]) -> None:
    table = Table("", "median", "rounds")
    for name, values, form in (
        ("tokens/s without the page", [each.alone.speed for each in found], "{:.0f}"),
        (
            "tokens/s with it / without",
            [each.watched.speed / each.alone.speed for each in found],
            "{:.3f}",
        ),
        ("µs a token without the page", [each.alone.cpu for each in found], "{:.1f}"),
        (
            "µs a token with it / without",
            [each.watched.cpu / each.alone.cpu for each in found],
            "{:.3f}",
        ),
        ("frames a second", [each.frames for each in found], "{:.1f}"),
        ("99 % of frames within, ms", [each.gap_p99_ms for each in found], "{:.1f}"),
    ):
        rounds = " ".join(form.format(value) for value in values)
        table.add_row(name, form.format(median(values)), rounds)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256, help="of one run")
    parser.add_argument("--json", type=Path, help="file to write the rounds to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = pairs(options, Path(folder))
    show(found)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
