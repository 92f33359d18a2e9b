"""The interface that seals and opens bytes for the queue protocol. Knows no cipher.

A record's kind and binding (request, position, ...) are authenticated with it. So it can be opened
only as what it is, and no record can replace another one.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol, TypeVar

from ..errors import MessageError
from .keyring import ID_BYTES

# Not the beginning of msgpack (0xc1 is not used), of JSON or of other UTF-8; as a token id it would
# be in no vocabulary. The last byte is the version.
MAGIC = b"\xc1HS"
VERSION = 1
PREFIX = MAGIC + bytes([VERSION])
# Larger data is sealed in a thread: sealing 1 MiB takes a millisecond.
LARGE_BYTES = 2**18

Binding = tuple[str | int, ...]
T = TypeVar("T")


class PayloadKind(StrEnum):
    """The kind of a sealed record; its binding is in brackets."""

    PAYLOAD = "payload"  # (model, request)
    OUTCOME = "outcome"  # (model, request)
    JOURNAL = "journal"  # (model, request, writer, choice, index)
    JOURNAL_LOGPROBS = "journal logprobs"  # the same
    JOURNAL_ENDING = "journal ending"  # (model, request, writer, choice)
    FRAME = "frame"  # (gateway)
    CONTROL = "control"  # (engine)
    STORED_REQUEST = "stored request"  # (request)
    FILE = "file"  # (file)
    FILE_PIECE = "file piece"  # (file, tenant, number)
    BATCH = "batch"  # (batch)
    BATCH_PROGRESS = "batch progress"  # (batch)
    BATCH_RESULT = "batch result"  # (batch, tenant, line)
    MODEL_FILES = "model files"  # (model)
    IMAGE = "image"  # (model, digest)
    KV_EVENT = "kv event"  # (model, engine)
    CHECK = "check"  # ()


class SealingError(MessageError):
    """A record cannot be opened.

    Its key is not in the keyring, it was changed, it is another record, or it is not sealed
    although it must be.
    """

    code = "seal_invalid"


class Sealer(Protocol):
    """Seals and opens records. May be used by several threads."""

    @property
    def seals(self) -> bool:
        """Whether `seal` changes anything."""

    @property
    def opens(self) -> bool:
        """Whether it has keys."""

    @property
    def key_id(self) -> bytes:
        """The id of the key that seals; empty without keys."""

    def share(self, secret: bytes) -> None:
        """Sets the secret that `digests` uses, which all processes have in common."""

    def seal(self, kind: PayloadKind, binding: Binding, data: bytes) -> bytes: ...

    def open(self, kind: PayloadKind, binding: Binding, data: bytes) -> bytes:
        """Inverse of `seal`. Raises SealingError."""

    def digests(self, digest: bytes) -> tuple[bytes, ...]:
        """Digests of a client's text that Redis may see; the first one is this process's.

        Without the sealer's secret it is impossible to test texts against them. The others are
        those that other processes may have written for the same text.
        """


class NullSealer:
    """The sealer of a process without keys, which changes nothing."""

    seals = opens = False
    key_id = b""

    def share(self, _secret: bytes) -> None:
        """Ignores the secret."""

    def seal(self, _kind: PayloadKind, _binding: Binding, data: bytes) -> bytes:
        return data

    def open(self, kind: PayloadKind, _binding: Binding, data: bytes) -> bytes:
        """Returns the data. Raises SealingError for a record that another process has sealed."""
        if data.startswith(MAGIC):
            raise SealingError(
                f"{kind}: it is sealed, and this process has no keys: set sealing_keys_file"
            )
        return data

    def digests(self, digest: bytes) -> tuple[bytes, ...]:
        return (digest,)


NULL_SEALER = NullSealer()


def key_id_of(data: bytes) -> bytes:
    """The id of the key that has sealed a record."""
    return data[len(PREFIX) : len(PREFIX) + ID_BYTES]


async def sealed(sealer: Sealer, kind: PayloadKind, binding: Binding, data: bytes) -> bytes:
    """Seals like Sealer.seal; large data in a thread."""
    return await _run(sealer, lambda: sealer.seal(kind, binding, data), len(data))


async def opened(sealer: Sealer, kind: PayloadKind, binding: Binding, data: bytes) -> bytes:
    """Opens like Sealer.open; large data in a thread. Raises SealingError."""
    return await _run(sealer, lambda: sealer.open(kind, binding, data), len(data))


async def _run(sealer: Sealer, work: Callable[[], T], size: int) -> T:
    if size < LARGE_BYTES or not sealer.opens:
        return work()
    return await asyncio.to_thread(work)
