"""Logs of a process: JSON, one line each, or text for a terminal.

A line is a constant message plus fields: those of the call's `extra`, and those bound to the task
that logs, such as request_id and trace_id. Credentials are removed from every line. Prompts must
not be written into messages.
"""

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Literal, TextIO

from opentelemetry.trace import get_current_span

from ..errors import SettingsError

LogFormat = Literal["auto", "json", "text"]

REDACTED = "[redacted]"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_SECRET_FIELDS = frozenset(
    {"authorization", "api_key", "cookie", "headers", "password", "secret", "token"}
    | {"prompt", "messages", "text", "prompt_token_ids", "token_ids", "cache_salt"}
)
_URL_PASSWORD = re.compile(r"(://[^/@\s:\"']*):[^/@\s\"']+@")
_CREDENTIAL = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{4,}")
_RECORD_FIELDS = frozenset(
    vars(logging.LogRecord("", 0, "", 0, "", None, None)).keys()
    | {"message", "asctime", "taskName", "color_message"}
)
_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
_COLOURS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[1;31m"}

_bound: ContextVar[Mapping[str, object]] = ContextVar(
    "headrace_log_fields", default=MappingProxyType({})
)


@contextmanager
def bound(**fields: object) -> Iterator[None]:
    """Adds fields to every line that this task, and tasks started in the block, log within the
    block."""
    token = _bound.set({**_bound.get(), **fields})
    try:
        yield
    finally:
        _bound.reset(token)


def configure(
    level: str = "INFO", log_format: LogFormat = "auto", stream: TextIO | None = None
) -> None:
    """Sends the process's logs, uvicorn's included, to `stream` (default: stderr).

    `auto` is text on a terminal, else JSON. Start uvicorn with `log_config=None`. Raises
    SettingsError for an unknown level.
    """
    if level.upper() not in LEVELS:
        raise SettingsError(f"log level: must be one of {', '.join(LEVELS)}, not {level!r:.40}")
    stream = stream or sys.stderr
    if log_format == "auto":
        log_format = "text" if stream.isatty() else "json"
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        JsonFormatter() if log_format == "json" else TextFormatter(colour=stream.isatty())
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    _adopt_uvicorn()


class JsonFormatter(logging.Formatter):
    """One JSON object a line: timestamp, level, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "timestamp": _timestamp(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            error_type, error, _ = record.exc_info
            line["exception.type"] = error_type.__qualname__ if error_type else None
            line["exception.message"] = str(error)
            line["exception.stacktrace"] = self.formatException(record.exc_info)
        return scrubbed(json.dumps(line, default=str))


class TextFormatter(logging.Formatter):
    """`12:34:56.789 WARNING headrace_gateway.http.app  message  key=value`, for people."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        # A line stays one line, whatever it contains.
        message = f"{record.getMessage()}{' ' if fields else ''}{fields}"
        message = message.replace("\r", "\\r").replace("\n", "\\n")
        line = f"{when} {self._level(record.levelname)} {record.name}  {message}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return scrubbed(line)

    def _level(self, name: str) -> str:
        colour = _COLOURS.get(name) if self._colour else None
        return f"{colour}{name:<7}\x1b[0m" if colour else f"{name:<7}"


class AccessFilter(logging.Filter):
    """Makes uvicorn's access lines a constant message plus fields, without the query string."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and len(record.args) == 5:
            client, method, target, version, status = record.args
            record.msg, record.args = "http request", ()
            vars(record).update(
                {
                    "client.address": client,
                    "http.request.method": method,
                    "url.path": str(target).partition("?")[0],
                    "network.protocol.version": version,
                    "http.response.status_code": status,
                }
            )
        return True


def _adopt_uvicorn() -> None:
    """Lets uvicorn's loggers go through the root handler, at the root's level."""
    for name in _UVICORN:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
    access = logging.getLogger("uvicorn.access")
    if not any(isinstance(one, AccessFilter) for one in access.filters):
        access.addFilter(AccessFilter())


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = {**_trace_fields(), **_bound.get()}
    fields.update({k: v for k, v in vars(record).items() if k not in _RECORD_FIELDS})
    return {
        key: REDACTED if key.lower() in _SECRET_FIELDS else value for key, value in fields.items()
    }


def _trace_fields() -> dict[str, object]:
    context = get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def _timestamp(record: logging.LogRecord) -> str:
    when = datetime.fromtimestamp(record.created, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def scrubbed(line: str) -> str:
    """The line without passwords and credentials."""
    line = _URL_PASSWORD.sub(rf"\1:{REDACTED}@", line) if "://" in line else line
    return _CREDENTIAL.sub(rf"\1 {REDACTED}", line)
