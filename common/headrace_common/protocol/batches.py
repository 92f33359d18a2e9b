"""Files and batches as gateways store them: their records, as objects and as bytes.

Times are Unix seconds. Knows neither HTTP nor Redis.
"""

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ..errors import HeadraceError, MessageError

NO_METADATA: Mapping[str, str] = MappingProxyType({})


class FileNotStored(HeadraceError):
    """The file does not exist, has expired, or belongs to another tenant."""

    code = "file_not_found"


class BatchNotStored(HeadraceError):
    """The batch does not exist, has expired, or belongs to another tenant."""

    code = "batch_not_found"


def file_not_stored(file_id: str) -> FileNotStored:
    """The error for every reason, so that a client learns nothing about other tenants' files."""
    return FileNotStored(f"there is no file {file_id[:80]!r}, or it has expired")


def batch_not_stored(batch_id: str) -> BatchNotStored:
    """The error for every reason, as file_not_stored."""
    return BatchNotStored(f"there is no batch {batch_id[:80]!r}, or it has expired")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file's description; its content is stored beside it in `chunks` pieces.

    `models` are the models whose answers it contains, as far as known. `digest` is the content hash
    of an image in hex, "" for other files.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    chunks: int
    created_at: int
    expires_at: int
    models: tuple[str, ...] = ()
    digest: str = ""


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset(
    {BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """The batch as its client requested it; never changes.

    `key_id` is the id of the client's API key, "" without keys. Output files live for `output_ttl`
    seconds; the batch's records are stored until `kept_until`.
    """

    id: str
    tenant: str
    key_id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_ttl: int
    kept_until: int
    metadata: Mapping[str, str] = field(default_factory=lambda: NO_METADATA)


# A batch needs no results in the first part of its window, and all of them after the second.
_FREE_UNTIL, _DONE_AT = 0.25, 0.75


def is_behind(*, created: float, expires: float, now: float, total: int, done: int) -> bool:
    """Whether a batch has fewer results than it needs by now to end in time. Times in seconds."""
    passed = (now - created) / max(1.0, expires - created)
    return done < total * min(1.0, max(0.0, (passed - _FREE_UNTIL) / (_DONE_AT - _FREE_UNTIL)))


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one or many requests. Input includes cached tokens, output includes reasoning."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: "TokenUsage") -> "TokenUsage":
        return TokenUsage(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """A batch's progress, written by the gateway that leads it.

    `errors` are the errors of its input file, as clients read them. `model` is the first line's
    model, `models` are those of all lines. The tokens are those of `completed` requests.
    """

    status: BatchStatus = BatchStatus.VALIDATING
    total: int = 0
    completed: int = 0
    failed: int = 0
    model: str | None = None
    models: tuple[str, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[Mapping[str, Any], ...] = ()
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    ended_at: int | None = None
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch. `cancelling_at` is when a client cancelled it; its leader may not have seen that."""

    request: BatchRequest
    progress: BatchProgress = field(default_factory=BatchProgress)
    cancelling_at: int | None = None

    @property
    def state(self) -> str:
        """The batch's status as clients see it."""
        if self.cancelling_at is not None and not self.progress.status.final:
            return "cancelling"
        return self.progress.status.value

    @property
    def left(self) -> int:
        """The number of requests without a result, as far as known."""
        return self.progress.total - self.progress.completed - self.progress.failed


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The kind of one line's result (an answer or an error), and its length in bytes."""

    answered: bool
    size: int


Record = TypeVar("Record", bound=StoredFile | BatchRequest | BatchProgress)
_ADAPTERS: Mapping[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (StoredFile, BatchRequest, BatchProgress)
}


def encode_record(record: StoredFile | BatchRequest | BatchProgress) -> bytes:
    """Packs a record as JSON."""
    plain = {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in ((one.name, getattr(record, one.name)) for one in fields(record))
    }
    return json.dumps(plain, separators=(",", ":")).encode()


def decode_record(kind: type[Record], data: bytes) -> Record:
    """Unpacks and checks a record; unknown fields are ignored. Raises MessageError."""
    try:
        record: Record = _ADAPTERS[kind].validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "record"
        raise MessageError(f"{kind.__name__}: {field}: {first['msg']}") from None
    return record


def encode_done(done: BatchResult) -> bytes:
    return f"{int(done.answered)}:{done.size}".encode()


def decode_done(data: bytes) -> BatchResult:
    """Inverse of encode_done. Raises MessageError."""
    answered, _, size = data.partition(b":")
    if answered not in (b"0", b"1") or not size.isdigit():
        raise MessageError("a batch's line is marked in an unknown way")
    return BatchResult(answered == b"1", int(size))


def encode_usage(usage: TokenUsage) -> bytes:
    return ":".join(map(str, astuple(usage))).encode()


def decode_usage(data: bytes) -> TokenUsage:
    """Inverse of encode_usage. Raises MessageError."""
    numbers = data.split(b":")
    if len(numbers) != len(fields(TokenUsage)) or not all(map(bytes.isdigit, numbers)):
        raise MessageError("a batch's line has used tokens in an unknown way")
    return TokenUsage(*map(int, numbers))
