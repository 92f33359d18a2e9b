"""Writes each line of a child's output as one JSON line of its log file.

Parses the project's own JSON lines, Valkey's format and plain text. Must not touch the terminal.
"""

import errno
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

MAX_LOG_BYTES = 32 * 2**20
MAX_LINE_BYTES = 64 * 2**10

_VALKEY = re.compile(r"^\d+:[A-Z] \d{1,2} \w{3} \d{4} [\d:.]+ (?P<level>[.\-*#]) (?P<message>.*)$")
_VALKEY_LEVELS = {".": "DEBUG", "-": "INFO", "*": "INFO", "#": "WARNING"}
_ALARMS = frozenset({"WARNING", "ERROR", "CRITICAL"})
# Fields of our processes' lines that a user at the terminal does not need.
_HIDDEN = frozenset(
    {"timestamp", "level", "logger", "message", "trace_id", "span_id", "exception.stacktrace"}
)
_MAX_SUMMARY_CHARS = 1000


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a child: `fields` go to its log file, `summary` is for the terminal."""

    level: str
    summary: str
    fields: dict[str, Any]
    structured: bool

    @property
    def alarming(self) -> bool:
        """Whether the user should see the line. Plain text is shown only when its process dies."""
        return self.structured and self.level in _ALARMS


def parse_line(text: str, stream: str) -> LogLine:
    """Parses a line of a child's `stdout` or `stderr` in any of the known formats."""
    fields = _json_object(text)
    if fields is not None and isinstance(fields.get("message"), str):
        level = str(fields.get("level", "INFO")).upper()
        return LogLine(level, _summary(fields), fields, True)
    if match := _VALKEY.match(text):
        level, message = _VALKEY_LEVELS[match["level"]], match["message"]
        return LogLine(level, message, _wrap(level, message, stream), True)
    return LogLine("INFO", text, _wrap("INFO", text, stream), False)


def _json_object(text: str) -> dict[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _summary(fields: dict[str, Any]) -> str:
    """`message key=value ...` on one line, without an exception that `error` already contains."""
    hidden = _HIDDEN
    if "error" in fields and str(fields.get("exception.message")) in str(fields["error"]):
        hidden |= {"exception.type", "exception.message"}
    extra = (f"{key}={value}" for key, value in fields.items() if key not in hidden)
    text = " ".join((fields["message"], *extra))
    return " ".join(text.split())[:_MAX_SUMMARY_CHARS]


def _wrap(level: str, message: str, stream: str) -> dict[str, Any]:
    time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"timestamp": time, "level": level, "message": message, "stream": stream}


class LogFile:
    """Appends JSON lines to a file and renames it to `.1` at `max_bytes`.

    A line that cannot be written, for example to a full disk, is lost; later ones are tried again.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._file = self._open()
        self._losing = False

    def _open(self) -> IO[bytes]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path.open("ab", buffering=0)

    def write(self, line: LogLine) -> str | None:
        """Writes a line. If it is the first one that cannot be written, returns the reason."""
        data = json.dumps(line.fields, ensure_ascii=False, default=str).encode() + b"\n"
        try:
            # After a failed write, first ends the line that it may have begun.
            self._append(b"\n" + data if self._losing else data)
        except OSError as error:
            begins, self._losing = not self._losing, True
            return f"{self.path}: {error.strerror or error}" if begins else None
        self._losing = False
        return None

    def _append(self, data: bytes) -> None:
        if self._file.tell() + len(data) > self._max_bytes:
            with suppress(FileNotFoundError):  # the file was deleted
                self.path.replace(self.path.with_name(self.path.name + ".1"))
            full, self._file = self._file, self._open()
            full.close()
        if self._file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()


class LineBuffer:
    """Splits a byte stream into lines, and cuts lines that are longer than MAX_LINE_BYTES."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return [_text(line) for line in lines if line.strip()]

    def flush(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest.strip() else []


def _text(line: bytes) -> str:
    return line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip("\r")
