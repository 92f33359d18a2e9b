"""Draws curves with logarithmic axes, each with its limit and with what linear growth would be."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter

from peers_plot import save

from .curve import Curve

COLUMNS = 4
LINE, LINEAR, LIMIT = "#00796b", "#9e9e9e", "#c62828"


def draw(curves: Sequence[Curve], file: Path) -> None:
    """Writes the picture."""
    # A cost below the clock's resolution has no place on a logarithmic axis.
    curves = [curve for curve in curves if any(cost > 0 for _, cost in curve.points)]
    rows = -(-len(curves) // COLUMNS)
    figure, grid = plt.subplots(
        rows, COLUMNS, figsize=(3.1 * COLUMNS, 2.5 * rows), layout="constrained", squeeze=False
    )
    for axes in grid.flat[len(curves) :]:
        axes.set_visible(False)
    for axes, curve in zip(grid.flat, curves, strict=False):
        points = [(size, cost) for size, cost in curve.points if cost > 0]
        sizes, costs = zip(*points, strict=True)
        axes.loglog(sizes, costs, color=LINE, marker="o", markersize=3)
        last = costs[-1]
        axes.loglog(sizes, [last * size / sizes[-1] for size in sizes], color=LINEAR, ls=":", lw=1)
        bounds = [min(costs), max(costs)]
        if curve.limit is not None:
            axes.axhline(curve.limit, color=LIMIT, lw=1)
            bounds.append(curve.limit)
        axes.set_ylim(min(bounds) / 3, max(bounds) * 3)
        axes.set_title(curve.name, fontsize=8)
        axes.set_xlabel(curve.size, fontsize=7)
        axes.set_ylabel(f"{curve.cost} ({curve.unit})", fontsize=7)
        axes.tick_params(labelsize=6)
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, file, dpi=110)
