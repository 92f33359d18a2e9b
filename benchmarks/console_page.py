"""What an open page of the console costs, and how smoothly it draws.

    PYTHONPATH=tests/support python benchmarks/console_page.py [--rounds 5] [--sequences 64]

Starts `headrace up` with the demo model and loads it with `headrace bench`, in turns with and
without a page that shows the live view. The server's processes have the machine's first core; the
load and the browser have the others, as they are on other machines in production. Prints the ratios
of the pairs, and the frames that the browser drew a second. Needs Chromium
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
class Pair:
    """One round: tokens a second without and with the page; frames a second of the page, and the
    longest time between two of the 99 % closest ones, in milliseconds."""

    alone: float
    watched: float
    frames: float
    gap_p99_ms: float

    @property
    def ratio(self) -> float:
        return self.watched / self.alone


def load(url: str, options: argparse.Namespace, folder: Path) -> float:
    """Output tokens a second of one run."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "headrace_cli", "bench", "--url", url, "--warmup", "0"]
    command += ["--concurrency", str(options.sequences), "--requests", str(options.requests)]
    command += ["--prompt-tokens", "16-64", "--output-tokens", "128-256", "--out", str(report)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return float(json.loads(report.read_text())["output_tokens_per_s"])


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
            load(up.url, options, folder)
            for number in range(options.rounds):
                measured: dict[bool, float] = {}
                frames = (0.0, 0.0)
                for watched in (number % 2 == 0, number % 2 == 1):
                    page = browser.new_page(viewport={"width": 1280, "height": 900})
                    if watched:
                        page.goto(f"{up.url}/#live")
                        page.locator(".engine").first.wait_for()
                        page.evaluate(COUNT_FRAMES)
                    measured[watched] = load(up.url, options, folder)
                    if watched:
                        frames = drawn(page)
                    page.close()
                found.append(Pair(measured[False], measured[True], *frames))
                print(f"round {number + 1}/{options.rounds}: {found[-1].ratio:.3f}", flush=True)
    return found


def show(found: list[Pair]) -> None:
    table = Table("", "median", "rounds")
    for name, values, form in (
        ("tokens/s without the page", [each.alone for each in found], "{:.0f}"),
        ("tokens/s with the page", [each.watched for each in found], "{:.0f}"),
        ("with / without", [each.ratio for each in found], "{:.3f}"),
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
