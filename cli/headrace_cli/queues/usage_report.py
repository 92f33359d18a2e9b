"""`headrace usage report`: sums of the ledger, or its entries, as a table, CSV, JSON or Parquet."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace_common.errors import BackendUnfit
from headrace_common.protocol.ledger import UsageEntry
from headrace_common.protocol.redis.admin import QueueAdmin
from headrace_common.protocol.redis.client.connection import Connection
from headrace_common.protocol.redis.ledger import LedgerReader, registered_models

from ..errors import CliError, UsageError
from ..tables import plain_table
from .queues import QueueSession

FORMATS = ("table", "csv", "json", "parquet")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

Row = dict[str, Any]
KEYS: Mapping[str, Callable[[UsageEntry], str]] = {
    "day": lambda entry: day(entry.ended_ms),
    "key": lambda entry: entry.key,
    "tenant": lambda entry: entry.tenant,
    "model": lambda entry: entry.model,
    "adapter": lambda entry: entry.adapter,
    "outcome": lambda entry: entry.outcome.value,
}


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What is reported. Without `by` each entry is a row. `since_ms` is in Unix ms."""

    by: Sequence[str]
    since_ms: int
    format: str
    file: Path | None
    models: Sequence[str] | None


def report(session: QueueSession, options: ReportOptions) -> None:
    """Raises CliError."""
    if options.format == "parquet" and options.file is None:
        raise UsageError("a Parquet file is not text", "name it with --output")
    if options.format == "parquet":
        _check_pyarrow()
    entries = session.connect(lambda connection: _read(connection, options))
    rows = summed(entries, options.by) if options.by else [as_row(entry) for entry in entries]
    _write(session, options, rows, _names(options.by))


async def _read(connection: Connection, options: ReportOptions) -> list[UsageEntry]:
    reader = LedgerReader(connection, await ledgers(connection, options.models))
    return [entry async for entry in reader.entries(options.since_ms)]


async def ledgers(connection: Connection, models: Sequence[str] | None) -> dict[str, int]:
    """The models whose ledgers are read, and the numbers of their shards."""
    try:
        known = await QueueAdmin(connection).models()
    except BackendUnfit:  # gateways' user may not look for keys
        known = await registered_models(connection)
    if models is None:
        return known
    if unknown := sorted(set(models) - known.keys()):
        raise UsageError(
            f"there is no queue of {', '.join(unknown)}", f"there is {', '.join(known) or 'none'}"
        )
    return {model: known[model] for model in models}


def since(text: str, now: datetime) -> int:
    """Unix ms of a time that is given as `36h`, `7d`, or as a day or time of ISO 8601.

    Raises UsageError.
    """
    if match := re.fullmatch(r"(\d{1,6})([smhd])", text):
        at = now - timedelta(seconds=int(match[1]) * _UNITS[match[2]])
    else:
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            raise UsageError(
                f"--since {text!r} is no time", "write 24h, 7d or 2026-01-31"
            ) from None
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0, int(at.timestamp() * 1000))


def day(unix_ms: int) -> str:
    """The day in UTC."""
    return datetime.fromtimestamp(unix_ms / 1000, UTC).date().isoformat()


def time(unix_ms: int) -> str:
    moment = datetime.fromtimestamp(unix_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def as_row(entry: UsageEntry) -> Row:
    """An entry as it is exported."""
    return {
        "id": entry.entry_id,
        "request_id": entry.request_id,
        "accepted": time(entry.accepted_ms),
        "ended": time(entry.ended_ms),
        "key": entry.key,
        "tenant": entry.tenant,
        "model": entry.model,
        "adapter": entry.adapter,
        "outcome": entry.outcome.value,
        "prompt_tokens": entry.prompt_tokens,
        "cached_tokens": entry.cached_tokens,
        "output_tokens": entry.output_tokens,
        "engine_seconds": entry.engine_ms / 1000,
        "kv_byte_seconds": entry.kv_byte_seconds,
        "attempts": entry.attempts,
    }


_COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens", "engine_seconds", "kv_byte_seconds")
_ENTRY = ("id", "request_id", "accepted", "ended", "key", "tenant", "model", "adapter", "outcome")


def _names(by: Sequence[str]) -> Sequence[str]:
    return (*by, "requests", *_COUNTS) if by else (*_ENTRY, *_COUNTS, "attempts")


def summed(entries: Iterable[UsageEntry], by: Sequence[str]) -> list[Row]:
    """Sums of the entries that agree in `by`. Corrections of a request do not count as requests."""
    sums: dict[tuple[str, ...], Row] = {}
    for entry in entries:
        group = tuple(KEYS[name](entry) for name in by)
        empty: Row = {
            **dict(zip(by, group, strict=True)),
            "requests": 0,
            **dict.fromkeys(_COUNTS, 0),
        }
        row = sums.setdefault(group, empty)
        row["requests"] += entry.part == 0
        for name, value in as_row(entry).items():
            if name in _COUNTS:
                row[name] += value
    for row in sums.values():
        row["engine_seconds"] = round(row["engine_seconds"], 3)
    return [sums[group] for group in sorted(sums)]


def _write(
    session: QueueSession, options: ReportOptions, rows: list[Row], names: Sequence[str]
) -> None:
    if options.format == "parquet":
        assert options.file is not None, "it was checked"
        _write_parquet(options.file, rows, names)
        return
    if options.format == "table" and options.file is None:
        table = plain_table(*(name.replace("_", " ") for name in names))
        for row in rows:
            table.add_row(*(str(row[name]) for name in names))
        session.output.out.print(table)
        return
    text = _json(rows) if options.format == "json" else as_csv(rows, names)
    if options.file is None:
        session.output.raw(text)
        return
    try:
        options.file.write_text(text)
    except OSError as error:
        raise CliError(f"{options.file} cannot be written: {error.strerror}") from error


def _json(rows: list[Row]) -> str:
    import json

    return json.dumps(rows, indent=2) + "\n"


def as_csv(rows: Iterable[Row], names: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _check_pyarrow() -> None:
    if find_spec("pyarrow") is None:
        raise UsageError("Parquet files need another package", "pip install pyarrow")


def _write_parquet(file: Path, rows: list[Row], names: Sequence[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {name: [row[name] for row in rows] for name in names}
    try:
        parquet.write_table(pyarrow.table(columns), file)
    except OSError as error:
        raise CliError(f"{file} cannot be written: {error}") from error
