"""Draws the results of gpu.py: each workload's share of its roofline with the goal, and the parts
of a decode step's time. Draws nothing if matplotlib is not installed."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .table import Result

STEP = "decode step, batch "
# Kinds of kernels, named as in the module `engine`, in the order of drawing.
COLOURS = {
    "products": "#4878a8", "attention": "#6aa56a", "sampling": "#c9a23f", "all else": "#a06a9c",
    "nothing": "#d0d0d0",
}  # fmt: skip


def draw(found: Sequence[Result], path: Path) -> bool:
    """Draws the results; returns False if there are none or matplotlib is missing."""
    shares = [one for one in found if "share" in one and _is_workload(one)]
    steps = _steps(found)
    if not (shares or steps) or importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.5 + 0.3 * len(shares) + 0.45 * len(steps)), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=(1 + len(shares), 1.5 + 1.5 * len(steps)))
    _draw_shares(upper, shares)
    _draw_steps(lower, steps)
    figure.savefig(path)
    return True


def _is_workload(result: Result) -> bool:
    detail = str(result["what"]).startswith((STEP, "tuned: "))
    return result["part"] in ("steps", "serving", "lora") and not detail


def _draw_shares(axes: Any, shares: Sequence[Result]) -> None:
    for place, one in enumerate(shares):
        axes.barh(place, min(100, 100 * one["share"]), color=COLOURS["products"])
        axes.text(101, place, f"{100 * one['share']:.1f} %", va="center")
        if one.get("goal"):
            goal = 100 * one["goal"]
            axes.plot([goal, goal], [place - 0.45, place + 0.45], color="#c03030", linewidth=2)
    axes.set_yticks(range(len(shares)), [f"{one['model']}: {one['what']}" for one in shares])
    axes.invert_yaxis()
    axes.set_xlim(0, 115)
    axes.set_xlabel("% of the roof; red: goal")


def _steps(found: Sequence[Result]) -> dict[str, dict[str, float]]:
    """The microseconds of each profiled decode step by kind of kernel."""
    steps: dict[str, dict[str, float]] = {}
    for one in found:
        if one["part"] == "steps" and one["what"].startswith(STEP):
            what, _, kind = one["what"].removeprefix("decode step, ").rpartition(": ")
            steps.setdefault(f"{one['model']}: {what}", {})[kind] = float(one["value"])
    return steps


def _draw_steps(axes: Any, steps: dict[str, dict[str, float]]) -> None:
    for place, kinds in enumerate(steps.values()):
        whole, begin = sum(kinds.values()) or 1.0, 0.0
        for kind, colour in COLOURS.items():
            share = 100 * kinds.get(kind, 0.0) / whole
            axes.barh(place, share, left=begin, color=colour, label=kind if place == 0 else None)
            begin += share
        axes.text(101, place, f"{whole:,.0f} µs", va="center")
    axes.set_yticks(range(len(steps)), list(steps))
    axes.invert_yaxis()
    axes.set_xlim(0, 115)
    axes.set_xlabel("% of a decode step")
    if steps:
        axes.figure.legend(ncols=len(COLOURS), loc="outside lower center")
