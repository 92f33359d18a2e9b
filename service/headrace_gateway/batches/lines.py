"""The lines of a batch's input file: one request each, checked before any of them runs.

Here it is checked whether each line is a request; its body is checked when it runs, as for any
request.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace_common.wire.messages import MAX_ID_CHARS

from ..errors import ApiError
from ..limits.budget import Budget
from ..limits.json_shape import TOO_COMPLEX, check_shape

EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", EMBEDDINGS, RESPONSES)
MAX_CUSTOM_ID_CHARS = 256
# The most faults that are reported of a file; the first one is enough to refuse it.
MAX_FAULTS = 20
# The most models of a batch that are distinguished. No key that is limited to models may use MANY.
MAX_MODELS = 64
MANY = ("",)
_FIELDS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True)
class Line:
    """A request. `number` is its place in the file, from 1; `start` and `end` are its bytes."""

    number: int
    custom_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Fault:
    """An error in a line, or in the file (line None)."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def body(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "line": self.line,
            "message": self.message,
            "param": self.param,
        }


class _BadLine(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


@dataclass(frozen=True, slots=True)
class BatchInput:
    """`content` with its lines, or with its faults.

    `model` is the first line's, `models` are all that lines name; MANY if these are too many.
    """

    content: bytes
    lines: tuple[Line, ...]
    faults: tuple[Fault, ...]
    model: str | None
    models: tuple[str, ...] = ()

    def body(self, line: Line) -> dict[str, Any]:
        """Returns the line's request body."""
        body: dict[str, Any] = json.loads(self.content[line.start : line.end])["body"]
        return body


def read_lines(content: bytes, endpoint: str, *, max_lines: int, max_line_bytes: int) -> BatchInput:
    """Reads and checks a whole file. Run it in a thread."""
    lines: list[Line] = []
    faults: list[Fault] = []
    seen: dict[str, int] = {}
    model: str | None = None
    models: set[str] = set()
    for number, start, end in _split(content):
        if len(lines) >= max_lines:
            message = f"The file has more than {max_lines} requests; split it."
            faults.append(Fault("too_many_requests", message))
            break
        try:
            _check_size(end - start, max_line_bytes)
            fields = _request(content[start:end], endpoint)
            custom_id = _unique(fields["custom_id"], number, seen)
        except _BadLine as bad:
            faults.append(Fault(bad.code, bad.message, number, bad.param))
            if len(faults) >= MAX_FAULTS:
                break
            continue
        model = model or fields["body"].get("model")
        models |= _named(fields["body"], models)
        lines.append(Line(number, custom_id, start, end))
    if not lines and not faults:
        faults.append(Fault("empty_file", "The file has no requests."))
    return BatchInput(
        content,
        tuple(lines),
        tuple(faults),
        model if isinstance(model, str) else None,
        MANY if len(models) > MAX_MODELS else tuple(sorted(models)),
    )


def _named(body: dict[str, Any], known: set[str]) -> set[str]:
    """Returns the model that a line names; nothing once `known` has more than MAX_MODELS."""
    model = body.get("model")
    return {model[:MAX_ID_CHARS]} if isinstance(model, str) and len(known) <= MAX_MODELS else set()


def _split(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields number, start and end of each line that is not blank."""
    start, number = 0, 0
    while start < len(content):
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end
        number += 1
        if content[start:end].strip():
            yield number, start, end
        start = end + 1


def _check_size(size: int, limit: int) -> None:
    """Checks a line before it is parsed, which takes many times its size."""
    if size > limit:
        message = f"The line has {size} bytes, over the limit of {limit}; send less in one request."
        raise _BadLine("request_too_large", message)


def _request(line: bytes, endpoint: str) -> dict[str, Any]:
    fields = _object(line)
    unknown = sorted(fields.keys() - _FIELDS)
    if unknown:
        raise _BadLine("unknown_parameter", f"Unknown field {unknown[0]!r:.80}.", unknown[0][:80])
    if fields.get("method") != "POST":
        raise _BadLine("invalid_method", "method must be 'POST'.", "method")
    if fields.get("url") != endpoint:
        raise _BadLine(
            "mismatched_endpoint", f"url must be the batch's endpoint, '{endpoint}'.", "url"
        )
    _check_body(fields.get("body"))
    return fields


def _object(line: bytes) -> dict[str, Any]:
    try:
        check_shape(line, Budget())
        fields = json.loads(line)
    except ApiError as error:
        raise _BadLine(TOO_COMPLEX, error.message) from error
    except (ValueError, RecursionError) as error:
        raise _BadLine("invalid_json_line", f"The line is not valid JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise _BadLine("invalid_json_line", "The line must be a JSON object.")
    return fields


def _check_body(body: object) -> None:
    if not isinstance(body, dict):
        raise _BadLine("missing_required_parameter", "body must be a JSON object.", "body")
    for name in ("stream", "background"):
        if body.get(name):
            raise _BadLine("invalid_value", f"{name} must be false in a batch.", f"body.{name}")


def _unique(custom_id: object, number: int, seen: dict[str, int]) -> str:
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise _BadLine(
            "invalid_custom_id",
            f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters.",
            "custom_id",
        )
    first = seen.setdefault(custom_id, number)
    if first != number:
        raise _BadLine(
            "duplicate_custom_id",
            f"custom_id must be unique; line {first} has the same.",
            "custom_id",
        )
    return custom_id
