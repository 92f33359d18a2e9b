"""Draws a run: distributions of latencies, and the progress over time.

Loads matplotlib only to draw.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from .report import (
    Measured,
    Report,
    end_to_end,
    time_per_output_token,
    time_to_first_token,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BARS = 60


def write_plot(path: Path, result: Report, measured: Measured) -> None:
    """Writes a PNG. Raises UsageError if the file cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(
        f"{result.model}: {result.completed}/{result.requests} requests, "
        f"{result.requests_per_s:.2f} requests/s, {result.output_tokens_per_s:.0f} output tokens/s"
    )
    (first, between), (flow, tokens) = figure.subplots(2, 2)
    good = [timeline for timeline in measured.timelines if timeline.error is None]
    firsts = [value for each in good if (value := time_to_first_token(each)) is not None]
    per_token = [value for each in good if (value := time_per_output_token(each)) is not None]
    _distribution(first, {"time to first token": firsts, "end to end": [*map(end_to_end, good)]})
    gaps = [gap for each in good for gap in each.gaps]
    _distribution(between, {"inter-token latency": gaps, "time per output token": per_token})
    _starts(flow, measured)
    _tokens(tokens, measured)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise UsageError(
            f"cannot write {path} ({error.strerror})", "choose another file with --png"
        ) from error


def _distribution(axes: "Axes", values: dict[str, Sequence[float]]) -> None:
    for label, each in values.items():
        if each:
            axes.ecdf([1000 * value for value in each], label=label)
    axes.set(xlabel="ms", ylabel="share of requests" if "end to end" in values else "share")
    axes.grid(alpha=0.3)
    if any(values.values()):
        axes.set_xscale("log")
        axes.legend()


def _starts(axes: "Axes", measured: Measured) -> None:
    """The latency of each request at the time when it was sent; failures at the bottom."""
    sent: list[float] = []
    latencies: list[float] = []
    failed: list[float] = []
    for each in measured.timelines:
        at = each.started - measured.started
        if each.error is not None:
            failed.append(at)
        elif (value := time_to_first_token(each)) is not None:
            sent.append(at)
            latencies.append(1000 * value)
    axes.scatter(sent, latencies, s=8, label="time to first token")
    if failed:
        axes.scatter(failed, [0.0] * len(failed), s=16, color="tab:red", marker="x", label="failed")
    axes.set(xlabel="s, when a request was sent", ylabel="ms", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()


def _tokens(axes: "Axes", measured: Measured) -> None:
    """Output tokens a second over the run, with each request's tokens spread over its decoding."""
    width = max(measured.duration / _BARS, 1e-9)
    sums = [0.0] * _BARS
    for each in measured.timelines:
        if each.first_token is None or each.last_token is None or not each.output_tokens:
            continue
        begin, end = each.first_token - measured.started, each.last_token - measured.started
        first, last = (min(_BARS - 1, max(0, int(at / width))) for at in (begin, end))
        for bar in range(first, last + 1):
            sums[bar] += each.output_tokens / (last - first + 1)
    axes.bar(
        [(bar + 0.5) * width for bar in range(_BARS)], [total / width for total in sums], width
    )
    axes.set(xlabel="s", ylabel="output tokens/s")
    axes.grid(alpha=0.3)
