"""Traces of arrivals: from a CSV file, or a synthetic day with a rhythm and bursts; and batches."""

import csv
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import SimulationError

COLUMNS = ("arrival_seconds", "prompt_tokens", "output_tokens")
DAY = 86_400.0
_NOON = 13.5
"""The hour between the two peaks of a day."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of arrival, in seconds from the start, with lengths in tokens.

    `batches` has the number of each request's batch, from 0; -1 for one whose client waits. None:
    there are no batches. A batch's requests arrive at once.
    """

    arrivals: NDArray[np.float64]
    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]
    batches: NDArray[np.int64] | None = None

    def interactive(self) -> "Trace":
        """Without batches."""
        if self.batches is None:
            return self
        kept = self.batches < 0
        return Trace(self.arrivals[kept], self.prompts[kept], self.outputs[kept])

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def seconds(self) -> float:
        return float(self.arrivals[-1]) if len(self) else 0.0

    def busiest_rate(self, window: float) -> float:
        """The highest rate in requests per second within a window of this many seconds."""
        bins = np.bincount((self.arrivals // window).astype(np.int64))
        return float(bins.max()) / window


@dataclass(frozen=True, slots=True, kw_only=True)
class Diurnal:
    """A synthetic load: low at night, high twice a day, with bursts on top.

    `peak_rate` is the requests a second at the top of the rhythm, `night` the share of it that is
    left at the lowest. A burst rises within a minute by up to `burst` times the peak rate, lasts 3
    to 15 minutes and falls as fast. Lengths are log-normal with the given means and cut at
    `longest` tokens. The rhythm has a period of `day` seconds, and is ahead by `shift` of it.
    Requests come in `open_hours` of its 24 hours alone, centred on the time between the peaks.
    """

    seconds: float = DAY
    day: float = DAY
    shift: float = 0.0
    peak_rate: float = 8.0
    night: float = 0.08
    open_hours: float = 24.0
    bursts: int = 8
    burst: float = 0.4
    prompt_mean: float = 1200.0
    output_mean: float = 600.0
    spread: float = 0.8
    longest: int = 8192
    seed: int = 0


def diurnal(load: Diurnal) -> Trace:
    """The same trace for the same load: Poisson arrivals, thinned to the rate of each moment."""
    random = np.random.default_rng(load.seed)
    starts = np.sort(random.uniform(0, load.seconds, load.bursts))
    lengths = random.uniform(180, 900, load.bursts)
    heights = random.uniform(0.5, 1.0, load.bursts) * load.burst * load.peak_rate
    highest = load.peak_rate * (1 + load.burst * max(1, load.bursts))
    count = random.poisson(highest * load.seconds)
    times = np.sort(random.uniform(0, load.seconds, count))
    days = times / load.day + load.shift
    rates = load.peak_rate * _rhythm(days, load.night)
    for start, length, height in zip(starts, lengths, heights, strict=True):
        rates += height * np.clip(np.minimum(times - start, start + length - times) / 60, 0, 1)
    from_noon = np.abs((days * 24 - _NOON + 12) % 24 - 12)
    rates[from_noon > load.open_hours / 2] = 0.0
    kept = times[random.uniform(0, highest, count) < rates]
    return Trace(
        arrivals=kept,
        prompts=_lengths(random, load.prompt_mean, load, len(kept)),
        outputs=_lengths(random, load.output_mean, load, len(kept)),
    )


def _rhythm(days: NDArray[np.float64], night: float) -> NDArray[np.float64]:
    """The share of the peak over a day: a morning peak, an afternoon peak, a quiet night."""
    hours = (days % 1.0) * 24
    tops = np.exp(-(((hours - 11) / 2.2) ** 2)) + np.exp(-(((hours - 16) / 2.8) ** 2))
    return np.asarray(night + (1 - night) * np.minimum(1.0, tops))


def _lengths(
    random: np.random.Generator, mean: float, load: Diurnal, count: int
) -> NDArray[np.int64]:
    middle = np.log(mean) - load.spread**2 / 2
    drawn = random.lognormal(middle, load.spread, count)
    return np.clip(drawn, 1, load.longest).astype(np.int64)


def read_csv(path: Path) -> Trace:
    """A file with the header arrival_seconds,prompt_tokens,output_tokens. Raises SimulationError.

    Rows may be in any order; the first arrival is second 0.
    """
    try:
        with path.open(newline="") as file:
            rows = _rows(csv.DictReader(file), path)
    except OSError as error:
        raise SimulationError(f"{path}: {error.strerror}; name a readable file") from error
    if not rows:
        raise SimulationError(f"{path}: holds no requests; add rows below the header")
    rows.sort()
    arrivals = np.array([row[0] for row in rows])
    return Trace(
        arrivals=arrivals - arrivals[0],
        prompts=np.array([row[1] for row in rows], dtype=np.int64),
        outputs=np.array([row[2] for row in rows], dtype=np.int64),
    )


def _rows(reader: "csv.DictReader[str]", path: Path) -> list[tuple[float, int, int]]:
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise SimulationError(f"{path}: no column {missing[0]}; the header is {','.join(COLUMNS)}")
    rows = []
    for number, row in enumerate(reader, start=2):
        try:
            parsed = float(row[COLUMNS[0]]), int(row[COLUMNS[1]]), int(row[COLUMNS[2]])
        except (ValueError, TypeError) as error:
            raise SimulationError(f"{path}, line {number}: {error}; write numbers") from error
        if not 0 <= parsed[0] < float("inf") or min(parsed[1:]) < 1:
            raise SimulationError(
                f"{path}, line {number}: {parsed} is out of range; seconds from 0, tokens from 1"
            )
        rows.append(parsed)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """Batches of equal size that are `share` of all requests, at random times in the first half of
    the trace."""

    share: float
    count: int = 8
    seed: int = 0


def with_batches(trace: Trace, load: BatchLoad) -> Trace:
    """Adds batches whose requests are as long as those of the trace, drawn at random."""
    random = np.random.default_rng(load.seed)
    lines = round(len(trace) * load.share / (1 - load.share) / load.count)
    created = np.sort(random.uniform(0, trace.seconds / 2, load.count))
    drawn = random.integers(0, len(trace), lines * load.count)
    arrivals = np.concatenate([trace.arrivals, np.repeat(created, lines)])
    batches = np.full(len(trace), -1, dtype=np.int64)
    order = np.argsort(arrivals, kind="stable")
    return replace(
        trace,
        arrivals=arrivals[order],
        prompts=np.concatenate([trace.prompts, trace.prompts[drawn]])[order],
        outputs=np.concatenate([trace.outputs, trace.outputs[drawn]])[order],
        batches=np.concatenate([batches, np.repeat(np.arange(load.count), lines)])[order],
    )
