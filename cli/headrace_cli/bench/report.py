"""What a load measured: percentiles, throughput and goodput, as data and as tables."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..tables import without_controls
from .client import Timeline

PERCENTILES = (50, 90, 95, 99)
# If the client uses this many cores, it may have slowed the load; its event loop can use one.
BUSY_CLIENT = 0.8
_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, percentiles and maximum of some values, in seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary | None":
        """The summary of values; None if there are none."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p95, p99 = (_percentile(ordered, percent) for percent in PERCENTILES)
        return cls(sum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The maximal latencies in seconds of a good request; None means no bound."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """`ttft:500ms,tpot:50ms`. Raises ValueError otherwise."""
        known = [field.name for field in fields(cls)]
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition(":")
            if name not in known:
                raise ValueError(f"must be of {', '.join(known)}, as ttft:500ms, not {part!r}")
            found[name] = _duration(value)
        return cls(**found)

    def met_by(self, timeline: Timeline) -> bool:
        """Whether a completed request keeps every bound that can be measured for it."""
        return all(
            bound is None or value is None or value <= bound
            for bound, value in (
                (self.ttft, time_to_first_token(timeline)),
                (self.tpot, time_per_output_token(timeline)),
                (self.e2e, end_to_end(timeline)),
            )
        )


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that completed within the SLO. `share` is of all requests of the run."""

    slo: Slo
    requests: int
    share: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """All requests of a run in the order of their sending, and times in seconds.

    `started` is the beginning of the run, of `time.perf_counter`. `lags` are the delays from
    planned arrival to sending; empty without planned arrivals. `cpu` is the CPU time that the
    client used.
    """

    timelines: Sequence[Timeline]
    lags: Sequence[float]
    started: float
    duration: float
    cpu: float
    wanted_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run. Latencies are of completed requests; tokens and requests a second of the whole run.

    `ttft_s`: send to first token. `itl_s`: between pieces of output, all requests' together.
    `tpot_s`: a request's mean time per token after its first. `e2e_s`: send to end.
    `send_lag_s`: how late requests were sent, given arrivals: a busy client, or --concurrency in
    the way of them. `in_flight`: requests that ran at a time, on average. `client_cpu`: the cores
    that the client itself used. `short_outputs`: tokens that are missing where a server was asked
    for exact lengths. `started`: seconds since 1970.
    """

    model: str
    started: float
    requests: int
    completed: int
    errors: dict[str, int]
    short_outputs: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    in_flight: float
    ttft_s: Summary | None
    itl_s: Summary | None
    tpot_s: Summary | None
    e2e_s: Summary | None
    send_lag_s: Summary | None
    goodput: Goodput | None
    client_cpu: float


def report(model: str, measured: Measured, *, exact: bool, slo: Slo | None) -> Report:
    """Summarises a run. `exact`: outputs were asked to have exactly their length."""
    everything = measured.timelines
    good = [timeline for timeline in everything if timeline.error is None]
    output = sum(timeline.output_tokens for timeline in good)
    prompt = sum(timeline.prompt_tokens or 0 for timeline in good)
    errors = Counter(timeline.error for timeline in everything if timeline.error)
    duration = measured.duration
    complete = exact and len(good) == len(everything)
    return Report(
        model=model,
        started=time.time() - time.perf_counter() + measured.started,
        requests=len(everything),
        completed=len(good),
        errors=dict(errors.most_common()),
        short_outputs=max(0, measured.wanted_tokens - output) if complete else 0,
        duration_s=duration,
        requests_per_s=len(good) / duration,
        output_tokens_per_s=output / duration,
        total_tokens_per_s=(output + prompt) / duration,
        prompt_tokens=prompt,
        output_tokens=output,
        in_flight=sum(end_to_end(timeline) for timeline in everything) / duration,
        ttft_s=Summary.of(_known(map(time_to_first_token, good))),
        itl_s=Summary.of([gap for timeline in good for gap in timeline.gaps]),
        tpot_s=Summary.of(_known(map(time_per_output_token, good))),
        e2e_s=Summary.of([end_to_end(timeline) for timeline in good]),
        send_lag_s=Summary.of(measured.lags),
        goodput=None if slo is None else _goodput(slo, good, measured),
        client_cpu=measured.cpu / duration,
    )


def record(timeline: Timeline, measured: Measured) -> dict[str, object]:
    """One request as data: times in seconds, `sent` from the start of the run."""
    return {
        "sent": timeline.started - measured.started,
        "ttft_s": time_to_first_token(timeline),
        "tpot_s": time_per_output_token(timeline),
        "e2e_s": end_to_end(timeline),
        "prompt_tokens": timeline.prompt_tokens,
        "output_tokens": timeline.output_tokens,
        "error": timeline.error,
    }


def _goodput(slo: Slo, good: Sequence[Timeline], measured: Measured) -> Goodput:
    met = sum(slo.met_by(timeline) for timeline in good)
    return Goodput(slo, met, met / max(1, len(measured.timelines)), met / measured.duration)


def time_to_first_token(timeline: Timeline) -> float | None:
    return None if timeline.first_token is None else timeline.first_token - timeline.started


def time_per_output_token(timeline: Timeline) -> float | None:
    """The mean time per token after the first one."""
    if timeline.first_token is None or timeline.last_token is None or timeline.output_tokens < 2:
        return None
    return (timeline.last_token - timeline.first_token) / (timeline.output_tokens - 1)


def end_to_end(timeline: Timeline) -> float:
    return timeline.ended - timeline.started


def show(result: Report, out: Console) -> None:
    """The report as tables."""
    title = f"{result.model}: {result.completed}/{result.requests} requests"
    table = Table(title=Text(without_controls(title)))
    table.add_column("milliseconds")
    for field in fields(Summary):
        table.add_column(field.name, justify="right")
    for title, summary in _latencies(result).items():
        if summary is not None:
            values = (getattr(summary, field.name) for field in fields(Summary))
            table.add_row(title, *(f"{1000 * value:.2f}" for value in values))
    out.print(table)
    for line in _lines(result):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    for kind, count in result.errors.items():
        out.print(f"{count} x {without_controls(kind)}", style="red", markup=False, highlight=False)


def _latencies(result: Report) -> Mapping[str, Summary | None]:
    return {
        "time to first token": result.ttft_s,
        "inter-token latency": result.itl_s,
        "time per output token": result.tpot_s,
        "end to end": result.e2e_s,
    }


def _lines(result: Report) -> list[str]:
    late = ""
    if result.send_lag_s is not None:
        late = f", sent {1000 * result.send_lag_s.p99:.1f} ms late (p99)"
    lines = [
        f"{result.requests_per_s:.2f} requests/s, {result.output_tokens_per_s:.1f} output tokens/s,"
        f" {result.total_tokens_per_s:.1f} tokens/s in all, over {result.duration_s:.1f} s with "
        f"{result.in_flight:.1f} in flight",
    ]
    if (good := result.goodput) is not None:
        lines.append(
            f"goodput: {good.requests_per_s:.2f} requests/s within the SLO, "
            f"{good.requests} of {result.requests} ({good.share:.1%})"
        )
    lines.append(f"client: {result.client_cpu:.2f} cores{late}")
    if result.client_cpu > BUSY_CLIENT:
        lines.append(
            "the client was busy, so the figures are the client's as much as the server's: spread "
            "the load over several `headrace bench`"
        )
    if result.short_outputs:
        lines.append(f"{result.short_outputs} output tokens fewer than asked")
    return lines


def _duration(text: str) -> float:
    """Seconds of `500ms` or `2s`."""
    for unit, seconds in _UNITS.items():
        if text.endswith(unit):
            try:
                value = float(text.removesuffix(unit)) * seconds
            except ValueError:
                break
            if 0 < value < float("inf"):
                return value
    raise ValueError(f"must be a time as 500ms or 2s, not {text!r}")


def _known(values: "map[float | None]") -> list[float]:
    return [value for value in values if value is not None]


def _percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile, interpolated linearly between the two nearest ranks."""
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
