"""Measures Headrace on one GPU and compares it with the device's rooflines, in under ten minutes.

    PYTHONPATH=engine:common python benchmarks/gpu.py [--out DIR] [--budget 560]
    python benchmarks/gpu.py --check                profiles, and the tests that need a GPU
    python benchmarks/gpu.py --only serving,lora    some parts again
    python benchmarks/gpu.py --small                every part with tiny models; --tiny: on a CPU

First measures the device's copy bandwidth and its rate of bfloat16 products, then decoding, prefill
and 1,000 conversations, and for comparison transformers. The models are a Llama of 8 billion
parameters, one of 1 billion, one with adapters, one in fp8 and one in 4 bits, and a mixture of
experts; their random weights are made on the device. Each part runs in a separate process with time
limits.

Results are printed as they come. DIR gets these files: results.jsonl, report.json, report.md,
summary.svg (with matplotlib) and work.tar.gz (logs, traces, the table of measured kernels). Needs
torch, Triton, transformers and safetensors; no network, no Redis.
"""

import argparse
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_benchmark.process import FAILED, SILENT, Limits, run_process
from gpu_benchmark.table import (
    RESULTS,
    ROOFS,
    Key,
    Result,
    by_key,
    kernels,
    ratios,
    read_results,
    row,
)
from gpu_report import write_reports

HERE = Path(__file__).parent
ROOT = HERE.parent
SUPPORT = ROOT / "tests" / "support"


@dataclass(frozen=True)
class Plan:
    """A part and its model, with its time limit and the limit between two results, in seconds."""

    part: str
    model: str
    limit: float
    silence: float = 90.0

    @property
    def name(self) -> str:
        return f"{self.part}:{self.model}"


# The most important part comes first: a part that exceeds the time is cut short and reports what it
# measured.
PLANS = (
    Plan("roofs", "8b", 45),
    Plan("steps", "8b", 160, 100),
    Plan("serving", "8b", 110),
    Plan("peers", "8b", 130),
    Plan("steps", "1b", 80, 60),
    Plan("deterministic", "8b", 70, 60),
    Plan("equality", "1b", 90, 60),
    Plan("kernels", "8b", 60, 45),
    Plan("lora", "8b-lora", 70, 60),
    Plan("steps", "8b-fp8", 60, 50),
    Plan("steps", "8b-int4", 60, 50),
    Plan("steps", "moe", 60, 50),
)
CHECKS = (
    Plan("roofs", "8b", 45),
    Plan("tests", "8b", 200, 75),
    Plan("profile", "8b", 100, 80),
    Plan("compiled", "8b", 240, 75),
    Plan("recurrent", "8b", 60, 50),
    Plan("profile", "1b", 60, 50),
)
# The tries of a part. If one fails or hangs, the next one does without features that may be the
# cause. The tests instead continue after the one that ended their process.
TRIES = ("whole", "untuned", "safe")
ONCE = ("roofs", "peers", "kernels", "recurrent")
UNTUNED_ANYWAY = ("deterministic", "equality")
TESTS, TEST_TRIES = ("tests", "compiled"), ("whole", "second", "third", "fourth")
# On CPUs the tests run in the interpreter, among the other tests. The kernels of recurrent layers
# have one size.
NOT_TINY = (*TESTS, "recurrent")
TINY_MODELS = {"8b-fp8": "tiny-fp8", "8b-int4": "tiny-int4", "moe": "tiny-moe"}
TINY_LIMIT = 120.0
# Files of an earlier run, in `work`.
OLD = (ROOFS, "*.log", "trace-*", "profile-*", "begun-*")
PACKED, REPORT = "work.tar.gz", "report.md"
# The size limit of the packed file, and the least factor by which traces shrink.
PACKED_BYTES, COMPRESSED = 14 << 20, 8
# A part does not start if fewer seconds are left.
LEAST = 5.0


@dataclass(frozen=True)
class Place:
    """`out` is for results, which are copied back from the device's machine; `work` is for all
    other files, which may be kept from run to run."""

    out: Path
    work: Path
    sizes: str = "full"


def run(plan: Plan, place: Place, left: float, kind: str = TRIES[0]) -> str | None:
    """Runs a part in its own process; returns the problem, or None."""
    full = place.sizes == "full"
    limit = min(plan.limit if full else TINY_LIMIT, left)
    if limit < LEAST:
        return "no time was left"
    command = [sys.executable, str(Path(__file__).resolve()), "--part", plan.part]
    command += ["--model", plan.model, "--try", kind, "--sizes", place.sizes]
    command += ["--out", str(place.out), "--work", str(place.work)]
    log = place.work / f"{plan.part}-{plan.model}-{kind}.log"
    limits = Limits(limit, min(limit, plan.silence if full else TINY_LIMIT))
    return run_process(
        command, log, environment(), limits, lambda: len(read_results(place.out / RESULTS))
    )


def environment() -> dict[str, str]:
    folders = [str(ROOT / "engine"), str(ROOT / "common"), str(HERE), str(SUPPORT)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Tests do not need them, and some tests are for other versions of packages than are
        # installed.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


def tries(plan: Plan) -> Sequence[str]:
    if plan.part in TESTS:
        return TEST_TRIES
    if plan.part in ONCE:
        return TRIES[:1]
    return TRIES[::2] if plan.part in UNTUNED_ANYWAY else TRIES


def run_tries(plan: Plan, place: Place, deadline: float) -> str | None:
    """Returns the problem of each try, if any. A try does not repeat what earlier tries have
    measured."""
    reports: list[str] = []
    for kind in tries(plan):
        problem = run(plan, place, deadline - time.monotonic(), kind)
        reports.append(f"{kind}: {problem or 'came to its end'}")
        if problem is not None:
            print(f"{plan.name}: {reports[-1]}", flush=True)
        if problem is None or not problem.startswith((FAILED, SILENT)):
            break
    return "; ".join(reports) if problem is not None or len(reports) > 1 else None


def measure(
    place: Place, budget: float, plans: Sequence[Plan], baseline: Mapping[Key, Result]
) -> int:
    """Runs all parts; returns how many did not complete."""
    deadline = time.monotonic() + budget
    begin(place)
    problems: dict[str, str] = {}
    shown = 0
    for plan in plans:
        problem = run_tries(plan, place, deadline)
        found = read_results(place.out / RESULTS)
        for one in found[shown:]:
            print("\n".join([row(one, baseline), *kernels(one)]), flush=True)
        shown = len(found)
        if problem is not None:
            problems[plan.name] = problem
        write_reports(place.out, problems)
        pack(place)
    print("\n".join(["", *summary(found, baseline), *problem_lines(problems)]))
    print(f"{budget - (deadline - time.monotonic()):.0f} s in all; {place.out / REPORT}")
    return len(problems)


def summary(found: Sequence[Result], baseline: Mapping[Key, Result]) -> list[str]:
    """Returns lines with the figures that have a goal; they end the log."""
    goals = [row(one, baseline) for one in found if one.get("goal") and "value" in one]
    return [*goals, *ratios(found)]


def problem_lines(problems: Mapping[str, str]) -> list[str]:
    return [f"{name}: {problem}" for name, problem in problems.items()]


def pack(place: Place) -> None:
    """Packs the files of `work`, the smallest first, into one file of limited size."""
    files = sorted((one for one in place.work.rglob("*") if one.is_file()), key=_size)
    room = PACKED_BYTES
    with tarfile.open(place.out / PACKED, "w:gz", compresslevel=3) as archive:
        for file in files:
            room -= _size(file) // COMPRESSED
            if room < 0:
                break
            archive.add(file, str(file.relative_to(place.work)))


def _size(file: Path) -> int:
    return file.stat().st_size


def begin(place: Place) -> None:
    for folder in (place.out, place.work):
        folder.mkdir(parents=True, exist_ok=True)
    (place.out / RESULTS).unlink(missing_ok=True)
    for old in (one for pattern in OLD for one in place.work.glob(pattern)):
        old.unlink(missing_ok=True)


def chosen(plans: Sequence[Plan], only: str, sizes: str = "full") -> list[Plan]:
    """The plans that `only` names, as part or part:model, and the rooflines, which all parts need.

    Raises SystemExit for an unknown name.
    """
    wanted = [name for name in only.split(",") if name]
    known = {name for plan in plans for name in (plan.part, plan.name)}
    if unknown := set(wanted) - known:
        raise SystemExit(
            f"--only {', '.join(sorted(unknown))}: there are {', '.join(sorted(known))}"
        )
    found = [
        plan
        for plan in plans
        if not wanted or plan.part == "roofs" or {plan.part, plan.name} & set(wanted)
    ]
    if sizes == "full":
        return found
    small = [replace(plan, model=TINY_MODELS.get(plan.model, "tiny")) for plan in found]
    once = {plan.name: plan for plan in small if plan.part not in NOT_TINY}
    return list(once.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(os.environ.get("OUT", "gpu-benchmark"))
    work = Path(tempfile.gettempdir()) / "headrace-gpu"
    parser.add_argument(
        "--out", type=Path, default=default, help="folder for results; default: $OUT"
    )
    parser.add_argument(
        "--work", type=Path, default=work, help=f"folder for other files; default: {work}"
    )
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for everything")
    parser.add_argument("--check", action="store_true", help="profiles and tests instead")
    parser.add_argument("--only", default="", help="parts, or part:model, with commas")
    parser.add_argument("--baseline", type=Path, help="results.jsonl of an earlier run")
    parser.add_argument(
        "--tiny", dest="sizes", action="store_const", const="tiny", help="tiny models on the CPU"
    )
    parser.add_argument(
        "--small", dest="sizes", action="store_const", const="small", help="tiny models on the GPU"
    )
    for hidden in ("--part", "--model", "--try", "--sizes"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.sizes or "full"
    if options.part:
        from gpu_benchmark.parts import Part, run_part

        kind = vars(options)["try"]
        run_part(Part(options.part, options.model, options.out, options.work, kind), sizes)
    baseline = by_key(read_results(options.baseline)) if options.baseline else {}
    plans = chosen(CHECKS if options.check else PLANS, options.only, sizes)
    place = Place(options.out, options.work, sizes)
    sys.exit(1 if measure(place, options.budget, plans, baseline) else 0)


if __name__ == "__main__":
    main()
