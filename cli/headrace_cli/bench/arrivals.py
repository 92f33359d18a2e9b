"""The times at which requests of a load arrive, in seconds from its start."""

import csv
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import count
from pathlib import Path

from .workload import Sizes


class Arrivals(StrEnum):
    """How requests of a given rate follow each other."""

    POISSON = "poisson"
    CONSTANT = "constant"
    BURST = "burst"


def arrival_times(
    kind: Arrivals, rng: random.Random, rate: float, *, burst: int = 1
) -> Iterator[float]:
    """Endless arrivals at `rate` per second on average, in bursts of `burst` requests."""
    if kind is Arrivals.POISSON:
        return poisson(rng, rate)
    size = burst if kind is Arrivals.BURST else 1
    return (number // size * size / rate for number in count())


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Endless arrivals of a Poisson process with `rate` per second.

    At an infinite rate all arrive at 0.
    """
    at = 0.0
    while True:
        if rate != float("inf"):
            at += rng.expovariate(rate)
        yield at


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request of a trace: its time in seconds from the first one, and its lengths."""

    at: float
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class _Columns:
    """The names of a format's columns; `unit` is that of times in seconds, None for dates."""

    at: str
    prompt: str
    output: str
    unit: float | None


_FORMATS = (
    _Columns("arrival_seconds", "prompt_tokens", "output_tokens", 1.0),  # `headrace simulate`
    _Columns("timestamp", "input_length", "output_length", 1e-3),  # Mooncake
    _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", None),  # Azure
    _Columns("Timestamp", "Request tokens", "Response tokens", 1.0),  # BurstGPT
)


def read_trace(path: Path) -> list[TracedRequest]:
    """The requests of a CSV or JSONL file by their times; the first one arrives at 0.

    Its columns are arrival_seconds, prompt_tokens and output_tokens, or those of the traces of
    Mooncake, Azure or BurstGPT. A length of 0 counts as 1. Raises ValueError naming the line that
    cannot be used.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not text in UTF-8") from None
    found = [_traced(row, where) for row, where in _rows(text, path)]
    if not found:
        raise ValueError(f"{path}: has no requests")
    found.sort(key=lambda request: request.at)
    first = found[0].at
    return [TracedRequest(request.at - first, request.sizes) for request in found]


def _rows(text: str, path: Path) -> Iterator[tuple[Mapping[str, object], str]]:
    lines = text.splitlines()
    if not text.lstrip().startswith("{"):
        for number, row in enumerate(csv.DictReader(lines), 2):
            yield row, f"{path}:{number}"
        return
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield dict(json.loads(line)), f"{path}:{number}"
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a JSON object ({error})") from None


def _traced(row: Mapping[str, object], where: str) -> TracedRequest:
    for columns in _FORMATS:
        if {columns.at, columns.prompt, columns.output} <= row.keys():
            break
    else:
        wanted = _FORMATS[0]
        raise ValueError(f"{where}: needs {wanted.at}, {wanted.prompt} and {wanted.output}")
    try:
        at = _seconds(str(row[columns.at]), columns.unit)
        prompt, output = int(str(row[columns.prompt])), int(str(row[columns.output]))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if min(prompt, output) < 0:
        raise ValueError(f"{where}: numbers of tokens must not be negative")
    return TracedRequest(at, Sizes(max(1, prompt), max(1, output)))


def _seconds(text: str, unit: float | None) -> float:
    if unit is None:
        return datetime.fromisoformat(text).timestamp()
    seconds = float(text) * unit
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"the time {text} is out of range")
    return seconds
