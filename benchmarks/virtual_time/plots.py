"""The pictures of docs/policies.md."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

COLOUR, ACCENT = "#9db4c0", "#1f6f8b"

# A panel's title, the name of its figure in a run's summary, the unit, and whether the axis is
# logarithmic.
Panel = tuple[str, str, str, bool]

BATCHING: tuple[Panel, ...] = (
    ("Output tokens/s", "output_tokens_per_second", "", False),
    ("Time to first token, p99", "ttft_ms_p99", "ms", True),
    ("Inter-token latency, p99", "itl_ms_p99", "ms", False),
    ("Computed slots that are padding", "padding_share", "%", False),
)
POLICIES: tuple[Panel, ...] = (
    ("Mean latency of what completed", "latency_mean_ms", "s", False),
    ("Urgent requests: TTFT, p99", "urgent_ttft_ms_p99", "s", False),
    ("Fairness between tenants (Jain)", "fairness", "", False),
    ("Deadlines met", "deadlines_met", "%", False),
)
SCALE = {"": 1.0, "ms": 1.0, "s": 1e-3, "%": 100.0}


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes both pictures and returns their paths."""
    batching, policies = results["batching"], results["policies"]
    titles = (
        f"{results['requests']:,} requests at {batching['load']:.0%} of the engine's capacity",
        f"{results['requests']:,} requests of three tenants at {policies['load']:.0%} of capacity",
    )
    return [
        _bars(folder / "scheduling-batching.png", titles[0], batching["runs"], BATCHING),
        _bars(folder / "scheduling-policies.png", titles[1], policies["runs"], POLICIES),
    ]


def _bars(
    path: Path, title: str, runs: Mapping[str, Mapping[str, float]], panels: tuple[Panel, ...]
) -> Path:
    figure, axes = plt.subplots(2, 2, figsize=(10, 5.6), layout="constrained")
    figure.suptitle(title, fontsize=12)
    for axis, panel in zip(axes.flat, panels, strict=True):
        _panel(axis, runs, panel)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _panel(axis: Any, runs: Mapping[str, Mapping[str, float]], panel: Panel) -> None:
    title, name, unit, logarithmic = panel
    values = [runs[run][name] * SCALE[unit] for run in runs]
    # A run that leaves requests unanswered is not compared by its latencies.
    candidates = [
        value
        for run, value in zip(runs, values, strict=True)
        if name in HIGHER_IS_BETTER or runs[run]["completed"] == 1.0
    ]
    best = (max if name in HIGHER_IS_BETTER else min)(candidates)
    colours = [ACCENT if value == best else COLOUR for value in values]
    bars = axis.barh(list(runs), values, color=colours)
    axis.invert_yaxis()
    axis.set_title(title + (f" ({unit})" if unit else ""), fontsize=10, loc="left")
    axis.bar_label(bars, [_short(value) for value in values], padding=3, fontsize=9)
    if logarithmic:
        axis.set_xscale("log")
    axis.margins(x=0.18)
    axis.spines[["top", "right"]].set_visible(False)


HIGHER_IS_BETTER = frozenset({"output_tokens_per_second", "fairness", "deadlines_met"})
"""Figures that are better when they are higher."""


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
