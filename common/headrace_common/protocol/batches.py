"""Files and batches as gateways keep them: what is known of each, as records and as bytes.

Times are Unix seconds. Knows neither HTTP nor Redis.
"""

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import HeadraceError, MessageError

NO_METADATA: Mapping[str, str] = MappingProxyType({})


class FileNotKept(HeadraceError):
    """There is no such file, or no longer, or it is another tenant's."""

    code = "file_not_found"


class BatchNotKept(HeadraceError):
    """There is no such batch, or no longer, or it is another tenant's."""

    code = "batch_not_found"


def file_not_kept(file_id: str) -> FileNotKept:
    """Whatever the reason is: a client learns nothing of what is not its own."""
    return FileNotKept(f"there is no file {file_id[:80]!r}, or it has expired")


def batch_not_kept(batch_id: str) -> BatchNotKept:
    """Does not tell the reason, like file_not_kept."""
    return BatchNotKept(f"there is no batch {batch_id[:80]!r}, or it has expired")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file's description; its content lies beside it in `chunks` pieces.

    `models` are those whose answers it has, as far as that is known.
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
    """What was asked for; never changes. `key_id` is the API key's that asked, "" without keys.

    Output files live `output_ttl` seconds, and what is known of the batch until `kept_until`.
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


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one request, or of many. Those that were cached are of the input's, those of
    reasoning of the output's."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: "TokenUsage") -> "TokenUsage":
        return TokenUsage(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """What its leader says of it. `errors` are those of its input file, as clients read them.

    `model` is the first line's, `models` are those of all. The tokens are those of `completed`
    requests.
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
    """`cancelling_at`: when a client asked for its end, which its leader has yet to see."""

    request: BatchRequest
    progress: BatchProgress = field(default_factory=BatchProgress)
    cancelling_at: int | None = None

    @property
    def state(self) -> str:
        """Its status as clients see it."""
        if self.cancelling_at is not None and not self.progress.status.final:
            return "cancelling"
        return self.progress.status.value

    @property
    def left(self) -> int:
        """Requests without a result, as far as it is known how many there are."""
        return self.progress.total - self.progress.completed - self.progress.failed


@dataclass(frozen=True, slots=True)
class Done:
    """One line that has its result: whether it is an answer, and its length in bytes."""

    answered: bool
    size: int


Record = TypeVar("Record", StoredFile, BatchRequest, BatchProgress)


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
        body = json.loads(data)
    except ValueError as error:
        raise MessageError(f"{kind.__name__}: not JSON: {error}") from error
    if not isinstance(body, dict):
        raise MessageError(f"{kind.__name__}: must be an object")
    hints = get_type_hints(kind)
    known = {name: _checked(kind, name, hints[name], body[name]) for name in hints if name in body}
    try:
        return kind(**known)
    except TypeError as error:
        raise MessageError(f"{kind.__name__}: {error}") from error


def _checked(kind: type[Any], name: str, hint: Any, value: Any) -> Any:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        allowed = tuple(one for one in get_args(hint) if one is not NoneType)
        if value is None or isinstance(value, allowed):
            return value
    elif origin is tuple:
        kind_of_items = str if get_args(hint)[0] is str else dict
        if isinstance(value, list) and all(isinstance(item, kind_of_items) for item in value):
            return tuple(value)
    elif origin is not None:
        if isinstance(value, dict) and all(isinstance(item, str) for item in value.values()):
            return value
    elif hint is BatchStatus:
        if value in set(BatchStatus):
            return BatchStatus(value)
    elif type(value) is hint:
        return value
    raise MessageError(f"{kind.__name__}: {name} is of another type")


def encode_done(done: Done) -> bytes:
    return f"{int(done.answered)}:{done.size}".encode()


def decode_done(data: bytes) -> Done:
    """Inverse of encode_done. Raises MessageError."""
    answered, _, size = data.partition(b":")
    if answered not in (b"0", b"1") or not size.isdigit():
        raise MessageError("a batch's line is marked in an unknown way")
    return Done(answered == b"1", int(size))


def encode_usage(usage: TokenUsage) -> bytes:
    return ":".join(map(str, astuple(usage))).encode()


def decode_usage(data: bytes) -> TokenUsage:
    """Inverse of encode_usage. Raises MessageError."""
    numbers = data.split(b":")
    if len(numbers) != len(fields(TokenUsage)) or not all(map(bytes.isdigit, numbers)):
        raise MessageError("a batch's line has used tokens in an unknown way")
    return TokenUsage(*map(int, numbers))
