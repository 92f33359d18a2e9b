"""Measures how long `headrace up` takes until it answers, and where its engine's time goes.

    python benchmarks/start.py [--model headrace-demo] [--rounds 5] [--against CHECKOUT ...]
        [--out FILE] [-- FLAGS OF UP]

Each round starts every checkout once, in turns, and ends it. A start lasts from the creation of the
process until the first request for one token is answered. CPU time and resident memory are those of
all processes after that request; on a shared machine, CPU time says more. The table has medians;
phases are those of the engine's line `engine ready`.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

TIMEOUT_S = 300.0
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds until the first answer, CPU seconds of all processes, resident MB by
    process, the engine's phases."""

    seconds: float
    cpu_s: float
    resident_mb: Mapping[str, int]
    engine_s: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="headrace-demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, nargs="*", default=[], help="other checkouts")
    parser.add_argument("--out", type=Path, help="JSON file for the single starts")
    parser.add_argument("flags", nargs="*", help="of `headrace up`, after --")
    return parser.parse_args()


def start(root: Path, model: str, flags: list[str]) -> Start:
    """Starts a checkout's `headrace up`, asks it for a token, and ends it."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        command = [str(root / ".venv" / "bin" / "python"), "-m", "headrace_cli", "up"]
        command += ["--model", model, "--port", str(port), "--data-dir", folder, *flags]
        begun = time.perf_counter()
        with running(command, root) as process:
            await_answer(process, f"http://127.0.0.1:{port}")
            seconds = time.perf_counter() - begun
            cpu, resident = used(process.pid)
        ready = line_of(Path(folder) / "logs" / "engine-0.log", "engine ready")
    return Start(seconds, cpu, resident, ready.get("seconds"), ready.get("phases", {}))


@contextmanager
def running(command: list[str], root: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def await_answer(process: subprocess.Popen[bytes], url: str) -> None:
    """Waits until a request for one token is answered."""
    deadline = time.monotonic() + TIMEOUT_S
    while not answers(url):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("`headrace up` ended, or does not answer: run it by hand")
        time.sleep(POLL_S)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=TIMEOUT_S) as answer:
            model = json.load(answer)["data"][0]["id"]
        body = {"model": model, "prompt": [5], "max_tokens": 1}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return True
    except (OSError, urllib.error.URLError, IndexError):
        return False


def used(pid: int) -> tuple[float, dict[str, int]]:
    """CPU seconds of a process and its children, and their resident MB by program. Shared pages
    count in each."""
    seconds, found = 0.0, dict[str, int]()
    root = psutil.Process(pid)
    for one in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            words = " ".join(one.cmdline())
            programs = ("headrace_engine", "headrace_gateway", "headrace_cli")
            name = next((name for name in programs if f"-m {name}" in words), one.name())
            found[name] = found.get(name, 0) + one.memory_info().rss // 2**20
            times = one.cpu_times()
            seconds += times.user + times.system
    return seconds, found


def line_of(log: Path, message: str) -> dict[str, Any]:
    """The fields of a process's first log line with this message; none if there is no such line."""
    for line in log.read_text().splitlines():
        with suppress(ValueError):
            entry: dict[str, Any] = json.loads(line)
            if entry.get("message") == message:
                return entry
    return {}


def table(results: Mapping[str, list[Start]]) -> Iterator[str]:
    """Medians, one column a checkout."""
    names = list(results)
    yield f"| | {' | '.join(names)} |"
    yield f"| --- |{' ---: |' * len(names)}"
    yield row("first answer, s", [[one.seconds for one in results[name]] for name in names])
    yield row("CPU of all processes, s", [[one.cpu_s for one in results[name]] for name in names])
    engines = [[one.engine_s for one in results[name] if one.engine_s] for name in names]
    yield row("engine ready, s", engines)
    for phase in dict.fromkeys(p for one in results.values() for run in one for p in run.phases):
        values = [[run.phases.get(phase, 0.0) for run in results[name]] for name in names]
        yield row(f"- {phase}, s", values, digits=3)
    totals = [[sum(run.resident_mb.values()) for run in results[name]] for name in names]
    yield row("resident, MB", totals, digits=0)
    for program in dict.fromkeys(
        p for one in results.values() for run in one for p in run.resident_mb
    ):
        sizes = [[run.resident_mb.get(program, 0) for run in results[name]] for name in names]
        yield row(f"- {program}, MB", sizes, digits=0)


def row(title: str, columns: Sequence[Sequence[float]], digits: int = 2) -> str:
    cells = (f"{median(values):.{digits}f}" if values else "-" for values in columns)
    return f"| {title} | {' | '.join(cells)} |"


def main() -> None:
    options = arguments()
    here = Path(__file__).resolve().parents[1]
    roots = {root.resolve().name: root.resolve() for root in (*options.against, here)}
    results: dict[str, list[Start]] = {name: [] for name in roots}
    for number in range(options.rounds + 1):
        for name, root in roots.items():
            found = start(root, options.model, options.flags)
            if number:  # the first round fills the page cache
                results[name].append(found)
    sys.stdout.write("\n".join(table(results)) + "\n")
    if options.out is not None:
        runs = {name: [asdict(one) for one in found] for name, found in results.items()}
        options.out.write_text(json.dumps(runs, indent=2) + "\n")


if __name__ == "__main__":
    main()
