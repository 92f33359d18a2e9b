"""The ledger of usage: what each request used, written by the script that ends it.

docs/protocol.md says where each value comes from. An entry has no prompt and no answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgpack

from ..errors import MessageError
from ..wire.keys import LEDGER_KEPT, LEDGER_TTL_MS


class UsageOutcome(StrEnum):
    """How a request ended, as an entry names it."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DEAD_LETTERED = "dead_lettered"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerBounds:
    """How many entries a shard's ledger keeps, and for how many milliseconds. 0 entries: none are
    written."""

    entries: int = LEDGER_KEPT
    kept_ms: int = LEDGER_TTL_MS

    @property
    def field(self) -> str:
        """The record's field `ul`; empty if the request is not entered."""
        return f"{self.entries} {self.kept_ms}" if self.entries else ""


@dataclass(frozen=True, slots=True)
class AttemptUsage:
    """What one attempt has used so far, as its engine counts it.

    `engine_ms` is the time since the request was given to the engine's core. `kv_byte_seconds` is
    the sum over time of the KV of prompt and output tokens; it grows evenly between two counts.
    """

    engine_ms: int = 0
    kv_byte_seconds: int = 0
    cached_tokens: int = 0

    @property
    def field(self) -> str:
        """The record's field `u<attempt>`."""
        return f"{self.engine_ms} {self.kv_byte_seconds} {self.cached_tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageEntry:
    """One entry. The sum of a request's entries is what it used.

    `part` is 0 in its first entry. Further ones correct it, by what is new since: numbers may be
    negative. `key` and `adapter` may be empty. Times are Unix milliseconds of Redis' clock.
    """

    request_id: str
    part: int
    model: str
    key: str
    tenant: str
    adapter: str
    outcome: UsageOutcome
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    engine_ms: int
    kv_byte_seconds: int
    attempts: int
    accepted_ms: int
    ended_ms: int

    @property
    def entry_id(self) -> str:
        """The same whenever the entry is read, and in no other entry."""
        return f"{self.request_id}:{self.part}" if self.part else self.request_id


def read_entry(model: str, stream_id: bytes, fields: Mapping[bytes, bytes]) -> UsageEntry:
    """Reads an entry of a model's ledger. Raises MessageError."""
    try:
        data = msgpack.unpackb(fields[b"e"])
        rid, part, key, tenant, adapter, ending, *counts = data
        prompt, cached, output, engine_ms, byte_seconds, attempts, accepted = map(int, counts[:7])
        return UsageEntry(
            request_id=str(rid),
            part=int(part),
            model=model,
            key=str(key),
            tenant=str(tenant),
            adapter=str(adapter),
            outcome=UsageOutcome(ending),
            prompt_tokens=prompt,
            cached_tokens=cached,
            output_tokens=output,
            engine_ms=engine_ms,
            kv_byte_seconds=byte_seconds,
            attempts=attempts,
            accepted_ms=accepted,
            ended_ms=int(stream_id.partition(b"-")[0]),
        )
    except (KeyError, ValueError, TypeError, msgpack.UnpackException) as error:
        raise MessageError(f"ledger entry {stream_id!r:.40}: {error!r:.80}") from error
