"""Prints results of gpu.py as a table, each with its roofline, its goal and the earlier result."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS, ROOFS = "results.jsonl", "roofs.json"

Result = Mapping[str, Any]
# The key of a result: part, model and measurement, which are the same in every run.
Key = tuple[str, str, str]
NO_VALUE = ("part", "model", "what", "top_kernels", "steps", "engine", "goal", "kinds")
# Further numbers of a result, shown after its value.
EXTRA = ("adapters_cost", "without_ms", "tokens_per_s")


def read_results(path: Path) -> list[Result]:
    """All complete lines of a file of results; none if there is no file."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def key(result: Result) -> Key:
    return str(result["part"]), str(result["model"]), str(result["what"])


def by_key(results: Sequence[Result]) -> dict[Key, Result]:
    """The last result with a value for each key."""
    return {key(one): one for one in results if "value" in one}


def row(result: Result, baseline: Mapping[Key, Result] | None = None) -> str:
    """A line of the table."""
    shown = f"{result['model']:10}{result['what']:52}"
    if "value" not in result:
        return shown + "  " + ", ".join(f"{k} {v}" for k, v in result.items() if k not in NO_VALUE)
    value = float(result["value"])
    number = f"{value:12.2e}" if 0.0 < abs(value) < 0.01 else f"{value:12.2f}"
    parts = (_share(result), _chosen(result), _extra(result), _kind_of_try(result), _goal(result))
    return f"{shown}{number} {result['unit']:11}" + "".join(parts) + change(result, baseline or {})


def change(result: Result, baseline: Mapping[Key, Result]) -> str:
    """The change since the same result of an earlier run."""
    before = baseline.get(key(result))
    if before is None or not before["value"]:
        return ""
    percent = 100.0 * (float(result["value"]) / float(before["value"]) - 1.0)
    return f"  was {float(before['value']):.2f} ({percent:+.1f} %)"


def _share(result: Result) -> str:
    return f"{100 * result['share']:6.1f} % of the roof" if "share" in result else ""


def _chosen(result: Result) -> str:
    if "chosen" not in result:
        return ""
    return f"  {result['chosen']}; {result['default']}: {result['default_us']:.2f}"


def _extra(result: Result) -> str:
    return "".join(f"  {name} {result[name]:.3g}" for name in EXTRA if name in result)


def _kind_of_try(result: Result) -> str:
    engine = result.get("engine")
    if not engine:
        return ""
    return "  (no graphs, no steps ahead)" if "enforce_eager" in engine else "  (untuned)"


def _goal(result: Result) -> str:
    if not result.get("goal"):
        return ""
    goal, lower = result["goal"], result.get("lower_is_better", False)
    return f"  goal {'<=' if lower else '>='} {goal if lower else f'{100 * goal:.0f} %'}"


def kernels(result: Result, most: int = 8) -> list[str]:
    """Table lines for the kernels of a step, if the result has a profile."""
    steps = result.get("steps", 1)
    return [
        f"{'':12}{one['us'] / steps:10.1f} us a step {one['calls'] / steps:8.1f} calls  "
        f"{one['kernel'][:60]}"
        for one in result.get("top_kernels", ())[:most]
    ]


def ratios(found: Sequence[Result]) -> list[str]:
    """Headrace's results relative to its peers', where both were measured."""
    ours = [one for one in found if one["part"] == "serving" and "value" in one]
    return [
        f"Headrace / {peer['what']}: {ours[-1]['value'] / peer['value']:.2f}x "
        f"(goal {peer['ours_wanted']}x)"
        for peer in found
        if ours and "ours_wanted" in peer and peer["value"] > 0
    ]
