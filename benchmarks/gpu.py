"""Headrace on one GPU, each figure beside the roof of the device: one command, under ten minutes.

    PYTHONPATH=engine:common python benchmarks/gpu.py [--out DIR] [--budget 560]
    python benchmarks/gpu.py --check ... profiles of decode steps, and the tests that need a GPU
    python benchmarks/gpu.py --tiny      every part on a CPU with a tiny model, in seconds

Measures the device's copy bandwidth and its rate of bfloat16 products first, then decoding, prefill
and 1,000 conversations with a Llama of 8 billion parameters, one of 1 billion and a mixture of
experts, random weights made on the device, beside transformers. Each part runs in a process of its
own with a limit of its own; results are printed as they come and kept in DIR: results.jsonl,
report.json, Chrome traces. Needs torch, Triton, transformers and safetensors; no network, no
Redis.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
SUPPORT = ROOT / "tests" / "support"


@dataclass(frozen=True)
class Plan:
    """A part, its model, and the seconds that it may take at most."""

    part: str
    model: str
    limit: float


# The most important first: what is late is cut short, and tells what it has.
PLANS = (
    Plan("roofs", "8b", 45),
    Plan("steps", "8b", 150),
    Plan("serving", "8b", 110),
    Plan("peers", "8b", 130),
    Plan("steps", "1b", 80),
    Plan("deterministic", "8b", 80),
    Plan("equality", "1b", 90),
    Plan("steps", "moe", 60),
    Plan("kernels", "8b", 80),
)
CHECKS = (
    Plan("roofs", "8b", 45),
    Plan("tests", "8b", 150),
    Plan("profile", "8b", 120),
    Plan("compiled", "8b", 240),
    Plan("profile", "1b", 80),
)
# Parts without this project's engine: doing without its graphs changes nothing there.
NO_ENGINE = ("roofs", "peers", "kernels", "tests", "compiled")
# On CPUs these run in the interpreter, among the other tests.
NOT_TINY = ("compiled",)
TINY_LIMIT = 120.0
FAILED = "ended with"
# With fewer seconds left a part is not begun.
LEAST = 5.0


def run(plan: Plan, out: Path, tiny: bool, left: float, safe: bool = False) -> str | None:
    """Runs a part in a process of its own; what went wrong, if anything. A `safe` one does without
    CUDA graphs and steps ahead of each other."""
    limit = min(TINY_LIMIT if tiny else plan.limit, left)
    if limit < LEAST:
        return "no time was left"
    command = [sys.executable, str(Path(__file__).resolve()), "--part", plan.part]
    command += ["--model", plan.model, "--out", str(out), *(["--tiny"] if tiny else [])]
    command += ["--safe"] if safe else []
    log = out / f"{plan.part}-{plan.model}{'-safe' if safe else ''}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment()
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"cut short after {limit:.0f} s"
    return None if code == 0 else f"{FAILED} {code}: {_tail(log)}"


def environment() -> dict[str, str]:
    folders = [str(ROOT / "engine"), str(ROOT / "common"), str(HERE), str(SUPPORT)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "TOKENIZERS_PARALLELISM": "false",
        # The tests need none, and some are for other packages than those that are there.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return " | ".join(lines[-4:])[-600:]


def results(out: Path) -> list[dict[str, Any]]:
    path = out / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def row(result: Mapping[str, Any]) -> str:
    """A line of the table."""
    shown = f"{result['model']:5}{result['what']:52}"
    if "value" not in result:
        skipped = ("part", "model", "what", "top_kernels", "steps")
        return shown + "  " + ", ".join(f"{k} {v}" for k, v in result.items() if k not in skipped)
    value = float(result["value"])
    number = f"{value:12.2e}" if 0.0 < abs(value) < 0.01 else f"{value:12.2f}"
    shown += f"{number} {result['unit']:11}"
    if "share" in result:
        shown += f"{100 * result['share']:6.1f} % of the roof"
    if "chosen" in result:
        shown += f"  {result['chosen']}; {result['default']}: {result['default_us']:.2f}"
    shown += "  (no graphs, no steps ahead)" if "engine" in result else ""
    if result.get("goal"):
        goal = result["goal"]
        lower = result.get("lower_is_better", False)
        shown += f"  goal {'<=' if lower else '>='} {goal if lower else f'{100 * goal:.0f} %'}"
    return shown


def kernels(result: Mapping[str, Any], most: int = 8) -> list[str]:
    """Where a step's time goes: lines of a table, if the result is of a profile."""
    steps = result.get("steps", 1)
    return [
        f"{'':7}{one['us'] / steps:10.1f} us a step {one['calls'] / steps:8.1f} calls  "
        f"{one['kernel'][:60]}"
        for one in result.get("top_kernels", ())[:most]
    ]


def compare(found: list[dict[str, Any]]) -> list[str]:
    """Headrace beside its peers, where both were measured."""
    ours = [one for one in found if one["part"] == "serving"]
    return [
        f"Headrace / {peer['what']}: {ours[0]['value'] / peer['value']:.2f}x "
        f"(goal {peer['ours_wanted']}x)"
        for peer in found
        if ours and "ours_wanted" in peer and peer["value"] > 0
    ]


def measure(out: Path, tiny: bool, budget: float, plans: Sequence[Plan] = PLANS) -> int:
    """Runs all parts; how many did not come to their end."""
    out.mkdir(parents=True, exist_ok=True)
    for old in ("results.jsonl", "roofs.json"):
        (out / old).unlink(missing_ok=True)
    begun, problems, shown = time.monotonic(), {}, 0
    parts: set[str] = set()
    for plan in plans:
        if tiny and (plan.part in parts or plan.part in NOT_TINY):
            continue  # the same model as before
        parts.add(plan.part)
        name = f"{plan.part} {plan.model}"
        plan = Plan(plan.part, "tiny" if tiny else plan.model, plan.limit)
        problem = run(plan, out, tiny, budget - (time.monotonic() - begun))
        if problem is not None and problem.startswith(FAILED) and plan.part not in NO_ENGINE:
            print(f"{name}: {problem}; once more, without graphs and steps ahead", flush=True)
            again = run(plan, out, tiny, budget - (time.monotonic() - begun), safe=True)
            problem = f"{problem}; once more: {again or 'came to its end'}"
        found = results(out)
        for one in found[shown:]:
            print("\n".join([row(one), *kernels(one)]), flush=True)
        shown = len(found)
        if problem is not None:
            problems[name] = problem
            print(f"{name}: {problem}", flush=True)
    found = results(out)
    ratios = compare(found)
    print("\n".join(ratios))
    report = {"results": found, "ratios": ratios, "problems": problems}
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"{time.monotonic() - begun:.0f} s in all; {out / 'report.json'}")
    return len(problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(os.environ.get("OUT", "gpu-benchmark"))
    parser.add_argument("--out", type=Path, default=default, help="folder; default: $OUT")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for everything")
    parser.add_argument("--check", action="store_true", help="profiles and tests instead")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--safe", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        from gpu_parts import run_part

        run_part(options.part, options.model, options.out, options.tiny, options.safe)
    plans = CHECKS if options.check else PLANS
    sys.exit(1 if measure(options.out, options.tiny, options.budget, plans) else 0)


if __name__ == "__main__":
    main()
