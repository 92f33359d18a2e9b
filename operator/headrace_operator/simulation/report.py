"""Results for people and programs: a table, JSON, a picture. Matplotlib is loaded only to draw."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table

from .errors import SimulationError
from .result import SimulationResult
from .sharing_comparison import ModelsResult

_COLORS = {
    "fixed peak": "#8c8c8c",
    "fixed mean": "#c9b458",
    "HPA": "#c44e52",
    "KEDA": "#8172b3",
    "oracle": "#55a868",
    "Headrace": "#2f6db3",
    "Headrace, yield": "#dd8452",
}


def table(results: Sequence[SimulationResult]) -> Table:
    """A table of results. GPU-hours are also given relative to the first result.

    scaled: the number of changes up/down. lost: requests that the full queue refused or that waited
    beyond their deadline. batch: the time that the slowest batch took, if there are any.
    """
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("policy", no_wrap=True)
    heads = ("SLO met", "TTFT p99", "TPOT p99", "GPU-hours", "share", "scaled", "most", "lost")
    batches = any(result.longest_batch is not None for result in results)
    for head in (*heads, "batch") if batches else heads:
        made.add_column(head, justify="right", no_wrap=True)
    for result in results:
        row = _row(result, results[0].gpu_hours)
        made.add_row(*row, *([_hours(result.longest_batch)] if batches else ()))
    return made


def _row(result: SimulationResult, base: float) -> list[str]:
    return [
        result.name,
        f"{result.attainment:.2%}",
        _seconds(result.time_to_first_token.get("p99")),
        _seconds(result.time_per_output_token.get("p99")),
        f"{result.gpu_hours:.1f}",
        f"{result.gpu_hours / base:.0%}" if base else "-",
        f"{result.scale_ups}/{result.scale_downs}",
        str(result.most_engines),
        str(result.refused + result.expired),
    ]


def sharing_table(results: Sequence[ModelsResult]) -> Table:
    """A table of ways to serve several models. GPU-hours are also given relative to the first.

    lowest: the model that met its objectives least often. wake-ups: of engines that share.
    """
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("models", no_wrap=True)
    for head in ("SLO met", "lowest", "GPU-hours", "share", "wake-ups"):
        made.add_column(head, justify="right", no_wrap=True)
    for each in results:
        made.add_row(
            each.name,
            f"{each.attainment:.2%}",
            f"{min(each.by_model):.2%}",
            f"{each.gpu_hours:.1f}",
            f"{each.gpu_hours / results[0].gpu_hours:.0%}",
            str(each.wake_ups),
        )
    return made


def _hours(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds / 3600:.1f} h"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


class Summarized(Protocol):
    def summary(self) -> dict[str, Any]: ...


def write_json(path: Path, inputs: dict[str, Any], results: Sequence[Summarized]) -> None:
    """Writes results as JSON. Raises SimulationError if the file cannot be written."""
    values = {"inputs": inputs, "results": [result.summary() for result in results]}
    try:
        path.write_text(json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise SimulationError(f"{path}: {error.strerror}; name a file to write") from error


def write_plot(path: Path, title: str, results: Sequence[SimulationResult]) -> None:
    """Arrivals, ready engines and waiting requests over time, one line a policy.

    Raises SimulationError if matplotlib is missing or the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise SimulationError(
            "--plot needs matplotlib: pip install 'headrace[simulate]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    load, engines, waiting = figure.subplots(3, sharex=True, height_ratios=(1, 2, 1.2))
    times = [sample.at / 3600 for sample in results[-1].samples]
    rates = [sample.arrival_rate for sample in results[-1].samples]
    load.fill_between(times, rates, color="#2f6db3", alpha=0.25, linewidth=0)
    load.set_ylabel("requests/s admitted")
    load.set_title(title, loc="left")
    for result in results:
        _draw(engines, waiting, result)
    engines.set_ylabel("ready engines")
    engines.set_ylim(0, 1.25 * max(sample.ready for each in results for sample in each.samples))
    engines.legend(loc="upper left", frameon=False, ncols=2)
    waiting.set_yscale("symlog", linthresh=1)
    waiting.set_ylim(bottom=0)
    waiting.set_ylabel("requests waiting")
    waiting.set_xlabel("hours")
    for axes in (load, engines, waiting):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise SimulationError(f"{path}: {error}; name a .png file to write") from error


def _draw(engines: Any, waiting: Any, result: SimulationResult) -> None:
    times = [sample.at / 3600 for sample in result.samples]
    look = {"color": _COLORS.get(result.name), "linewidth": 1.2}
    if result.name == "Headrace":
        look |= {"linewidth": 1.8, "zorder": 3}
    label = f"{result.name}: {result.attainment:.2%} met, {result.gpu_hours:.0f} GPU-hours"
    ready = [sample.ready for sample in result.samples]
    engines.plot(times, ready, label=label, drawstyle="steps-post", **look)
    waiting.plot(times, [sample.waiting for sample in result.samples], **look)
