"""Prints the results of gpu.py as Markdown, for docs/performance.md, and draws them.

    python benchmarks/gpu_report.py RESULTS.jsonl [--svg FILE]

The tables compare each figure with its roofline and its goal, and show where a decode step's time
goes, the chosen kernels, the cost of adapters, of quantised weights and of deterministic mode, and
the results of the checks.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gpu_benchmark.plots import draw
from gpu_benchmark.table import RESULTS, Result, ratios, read_results

STEP, TUNED = "decode step, batch ", "tuned: "
SPEEDS = ("steps", "serving", "peers", "lora")
CHECKS = ("equality", "kernels", "tests", "compiled")


def write_reports(out: Path, problems: Mapping[str, str]) -> None:
    """Writes report.json, report.md and, if matplotlib is installed, summary.svg for the results in
    `out`."""
    found = read_results(out / RESULTS)
    report = {"results": found, "ratios": ratios(found), "problems": problems}
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (out / "report.md").write_text(markdown(found, problems))
    draw(found, out / "summary.svg")


def markdown(found: Sequence[Result], problems: Mapping[str, str]) -> str:
    parts = [
        _versions(found),
        _table(("model", "workload", "measured", "of the roof", "goal", ""), _speeds(found)),
        "\n".join(f"- {line}" for line in ratios(found)),
        _table(("model", "decode step", "µs", "of its own roof"), _step_parts(found)),
        _table(("kernel", "chosen", "µs", "without measuring", "µs", "of the roof"), _tuned(found)),
        _table(("model", "checked", "found"), _checked(found)),
        "\n".join(f"- {name}: {problem}" for name, problem in problems.items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _versions(found: Sequence[Result]) -> str:
    line = next((one for one in found if one["what"] == "versions"), {})
    shown = {name: text for name, text in line.items() if name not in ("part", "model", "what")}
    roofs = [
        f"{one['what']} {_number(one)}"
        for one in found
        if one["part"] == "roofs" and "value" in one
    ]
    return ", ".join([*(f"{name} {text}" for name, text in shown.items()), *roofs])


def _speeds(found: Sequence[Result]) -> Iterable[Sequence[str]]:
    for one in found:
        if one["part"] in (*SPEEDS, "deterministic") and "value" in one and not _is_detail(one):
            yield one["model"], one["what"], _number(one), _percent(one), _goal(one), _met(one)


def _is_detail(result: Result) -> bool:
    return str(result["what"]).startswith((STEP, TUNED))


def _step_parts(found: Sequence[Result]) -> Iterable[Sequence[str]]:
    for one in found:
        if one["what"].startswith(STEP) and "value" in one and one["part"] != "profile":
            what = one["what"].removeprefix("decode step, ")
            yield one["model"], what, f"{one['value']:.0f}", _percent(one)


def _tuned(found: Sequence[Result]) -> Iterable[Sequence[str]]:
    for one in found:
        if one["what"].startswith(TUNED):
            yield (
                one["what"].removeprefix(TUNED), one["chosen"], f"{one['value']:.1f}",
                one["default"], f"{one['default_us']:.1f}", _percent(one),
            )  # fmt: skip


def _checked(found: Sequence[Result]) -> Iterable[Sequence[str]]:
    for one in found:
        if one["part"] in CHECKS:
            not_shown = ("part", "model", "what", "engine")
            plain = ", ".join(
                f"{name} {text}" for name, text in one.items() if name not in not_shown
            )
            yield one["model"], one["what"], _number(one) if "value" in one else plain


def _number(result: Result) -> str:
    value = float(result["value"])
    return f"{value:,.2f} {result['unit']}" if value >= 0.01 else f"{value:.2g} {result['unit']}"


def _percent(result: Result) -> str:
    return f"{100 * result['share']:.1f} %" if "share" in result else ""


def _goal(result: Result) -> str:
    goal = result.get("goal")
    if not goal:
        return ""
    return (
        f"<= {goal} {result['unit']}" if result.get("lower_is_better") else f">= {100 * goal:.0f} %"
    )


def _met(result: Result) -> str:
    if not result.get("goal"):
        return ""
    if result.get("lower_is_better"):
        return "met" if result["value"] <= result["goal"] else "missed"
    return "met" if result.get("share", 0.0) >= result["goal"] else "missed"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(header)} |", "| --- " * len(header) + "|", *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, help="results.jsonl")
    parser.add_argument("--svg", type=Path, help="file for the picture")
    options = parser.parse_args(arguments)
    found = read_results(options.results)
    print(markdown(found, {}), end="")
    if options.svg and not draw(found, options.svg):
        parser.error("--svg needs matplotlib")


if __name__ == "__main__":
    main()
