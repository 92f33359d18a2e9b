"""Draws a dashboard as PNG from a Prometheus: what Grafana would show, for the documentation.

Only for developers: `python charts/generate/pictures.py` makes the data and calls this.
"""

import json
import re
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from PIL import Image

from headrace_dashboards.panel import Dashboard, Look, Panel, Query, Unit

_COLUMNS = 24
_WIDTH, _ROW = 14.0, 0.26  # inches: of the picture, of one of its rows
_POINTS = 120
_BACKGROUND, _PANEL, _TEXT, _GRID = "#111217", "#181b1f", "#ccccdc", "#2c2f36"
_COLORS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#37872d", "#8ab8ff")
_STYLE: dict[Any, Any] = {
    "font.size": 7,
    "text.color": _TEXT,
    "axes.edgecolor": _GRID,
    "axes.facecolor": _PANEL,
    "axes.labelcolor": _TEXT,
    "axes.prop_cycle": cycler(color=_COLORS),
    "grid.color": _GRID,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
}
_SUFFIXES = {
    Unit.SECONDS: "s",
    Unit.BYTES: "B",
    Unit.PER_SECOND: "/s",
    Unit.TOKENS: " tok",
    Unit.TOKENS_PER_SECOND: " tok/s",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A period of time in Unix seconds; rates are computed over `window` seconds."""

    start: float
    end: float
    window: int = 20

    @property
    def step(self) -> float:
        return (self.end - self.start) / _POINTS

    @property
    def times(self) -> np.ndarray:
        return self.start + self.step * np.arange(_POINTS + 1)


@dataclass(frozen=True, slots=True)
class Series:
    """Values at `Span.times`; NaN where there is no value."""

    labels: Mapping[str, str]
    values: np.ndarray


class Source:
    """Asks a Prometheus for the series of panels."""

    def __init__(self, url: str, span: Span) -> None:
        self._url = url
        self.span = span

    def series(self, query: Query) -> list[Series]:
        text = query.expr.replace("$__rate_interval", f"{self.span.window}s")
        for variable in ("$namespace", "$model"):
            text = text.replace(variable, ".*")
        asked = {"query": text, "start": self.span.start, "end": self.span.end}
        parameters = urllib.parse.urlencode({**asked, "step": self.span.step})
        with urllib.request.urlopen(  # noqa: S310 - the address is the developer's own
            f"{self._url}/api/v1/query_range?{parameters}", timeout=60
        ) as answer:
            found = json.load(answer)["data"]["result"]
        return [Series(each["metric"], self._values(each["values"])) for each in found]

    def _values(self, samples: Sequence[tuple[float, str]]) -> np.ndarray:
        values = np.full(_POINTS + 1, np.nan)
        for time, value in samples:
            values[round((time - self.span.start) / self.span.step)] = float(value)
        return values


def render(dashboard: Dashboard, source: Source, file: Path) -> None:
    """Writes the picture; panels without data are marked as such."""
    places = _layout(dashboard)
    rows = max(top + panel.height for panel, _, top in places)
    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=(_WIDTH, _ROW * rows), facecolor=_BACKGROUND)
        for panel, left, top in places:
            _draw(panel, source, figure.add_axes(_place(panel, left, top, rows)))
        _save(figure, file)


def _place(panel: Panel, left: int, top: int, rows: int) -> tuple[float, float, float, float]:
    """Left, bottom, width and height of a panel's plot, with room for its title and labels."""
    margin_x, margin_y = 0.6 / _WIDTH, 0.2 / (_ROW * rows)
    x, width = left / _COLUMNS, panel.width / _COLUMNS
    y, height = 1 - (top + panel.height) / rows, panel.height / rows
    return x + margin_x, y + margin_y, width - 1.15 * margin_x, height - 2.2 * margin_y


def _save(figure: Figure, file: Path) -> None:
    """Saves the picture with a palette: close colours stay apart, and the file is small."""
    drawn = BytesIO()
    figure.savefig(drawn, dpi=100, facecolor=_BACKGROUND)
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(256).save(file, optimize=True)


def _layout(dashboard: Dashboard) -> list[tuple[Panel, int, int]]:
    """Each panel with its left column and top row."""
    places = []
    left = top = 0
    for row in dashboard.rows:
        for panel in row.panels:
            places.append((panel, left, top))
            left += panel.width
            if left >= _COLUMNS:
                left, top = 0, top + panel.height
    return places


def _draw(panel: Panel, source: Source, axes: Axes) -> None:
    axes.set_title(panel.title, loc="left", fontsize=8, color=_TEXT, pad=3)
    found = [
        (_name(query, series), series) for query in panel.queries for series in source.series(query)
    ]
    if not found:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "No data", ha="center", va="center", transform=axes.transAxes)
        return
    match panel.look:
        case Look.STAT:
            _stat(panel, found, axes)
        case Look.HEATMAP:
            _heatmap(panel, found, source.span, axes)
        case _:
            _lines(panel, found, source.span, axes)


def _name(query: Query, series: Series) -> str:
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: series.labels.get(found[1], ""), query.legend)
    return text or series.labels.get("le", "")


def _lines(panel: Panel, found: list[tuple[str, Series]], span: Span, axes: Axes) -> None:
    times = span.times - span.start
    names = [name for name, _ in found]
    if panel.look is Look.LINES:
        for name, series in found:
            axes.plot(times, series.values, label=name, linewidth=1)
    else:
        stacked = np.nan_to_num(np.array([series.values for _, series in found]))
        axes.stackplot(times, *stacked, labels=names, alpha=0.6)
    axes.set_ylim(bottom=0, top=panel.maximum)
    axes.set_xlim(times[0], times[-1])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _text(value, panel.unit)))
    axes.xaxis.set_major_formatter("{x:.0f}s")
    axes.grid(linewidth=0.5)
    if any(names):
        legend = axes.legend(loc="upper left", fontsize=6, facecolor=_PANEL, edgecolor="none")
        legend.get_frame().set_alpha(0.6)


def _heatmap(panel: Panel, found: list[tuple[str, Series]], span: Span, axes: Axes) -> None:
    """Buckets are cumulative: what fell between two edges is their difference."""
    ordered = sorted(found, key=lambda each: float(each[1].labels["le"]))
    edges = [float(series.labels["le"]) for _, series in ordered]
    cumulative = np.nan_to_num(np.array([series.values for _, series in ordered]))
    counts = np.maximum(0, np.diff(cumulative, axis=0, prepend=0))
    used = np.flatnonzero(counts.sum(axis=1))
    if not len(used):
        used = np.array([0])
    low, high = used[0], used[-1] + 1
    shown = np.ma.masked_less_equal(counts[low:high], 1e-9)
    times = span.times - span.start
    heights = np.arange(high - low + 1) - 0.5
    axes.pcolormesh(_edges(times), heights, shown**0.5, cmap="inferno")
    axes.xaxis.set_major_formatter("{x:.0f}s")
    ticks = range(0, high - low, max(1, (high - low) // 6))
    axes.set_yticks([*ticks], [_text(edges[low + tick], panel.unit) for tick in ticks])


def _edges(centers: np.ndarray) -> np.ndarray:
    """The edges of columns around evenly spaced centers."""
    half = (centers[1] - centers[0]) / 2
    return np.append(centers - half, centers[-1] + half)


def _stat(panel: Panel, found: list[tuple[str, Series]], axes: Axes) -> None:
    values = found[0][1].values
    known = values[~np.isnan(values)]
    last = float(known[-1]) if len(known) else 0.0
    axes.fill_between(range(len(values)), np.nan_to_num(values), color=_COLORS[0], alpha=0.25)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_ylim(bottom=0, top=max(2.5 * float(np.nanmax(values)), 1e-9))
    color = (
        _COLORS[4] if _over(last, panel.alarm) else _COLORS[1] if _over(last, panel.warn) else ""
    )
    axes.text(
        *(0.5, 0.6, _text(last, panel.unit)),
        ha="center",
        va="center",
        fontsize=16,
        color=color or _COLORS[0],
        transform=axes.transAxes,
    )


def _over(value: float, limit: float | None) -> bool:
    return limit is not None and value >= limit


def _text(value: float, unit: Unit) -> str:
    """A value formatted similarly to Grafana."""
    if unit is Unit.SHARE:
        return f"{100 * value:.3g}%"
    if value == float("inf"):
        return "+Inf"
    if unit is Unit.SECONDS and 0 < abs(value) < 1:
        return f"{1000 * value:.3g}ms"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size and unit is not Unit.SECONDS:
            return f"{value / size:.3g}{letter}{_SUFFIXES.get(unit, '')}"
    return f"{value:.3g}{_SUFFIXES.get(unit, '')}"
