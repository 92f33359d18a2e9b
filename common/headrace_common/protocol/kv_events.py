"""KV events: an engine tells gateways which KV blocks it has cached, on its device or on its host.

What it tells is a filter: a bit for each number of `bits` bits, which is set while the engine has a
block whose hash begins with these bits. So two blocks may share a bit, and a gateway may believe
that a block is cached that is not: that costs one computation. The filter's size bounds what an
engine can make Redis and gateways store. An event has the changed bits, or all of them.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import MessageError
from ..wire.block_hashes import MAX_BITS, MIN_BITS, block_position
from ..wire.decoding import count, versioned
from ..wire.messages import PROTOCOL_VERSION, pack_message, pack_tokens, unpack_tokens

MAX_CHANGES = 4096  # bits in one event; more changes are sent as a whole filter
MAX_EVENTS = 256  # events of an engine from a whole filter to the next one
MAX_EVENT_BYTES = 2**MAX_BITS // 8 + 1024
MAX_BLOCK_SIZE = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEvent:
    """A change of an engine's filter, or, with `whole`, all its bits as bytes.

    `number` counts the engine's events. `block_size` is the number of tokens of a block. `added`
    and `removed` are bits that are set from now on and that are not.
    """

    number: int
    block_size: int
    bits: int
    whole: bytes | None = None
    added: Sequence[int] = ()
    removed: Sequence[int] = ()


class BlockFilter:
    """The blocks that an engine probably has; all that it has are among them.

    Bit `p` of the filter is bit `p & 7` of the byte `p >> 3` of `content`.
    """

    __slots__ = ("bits", "block_size", "content")

    def __init__(self, bits: int, block_size: int, whole: bytes | None = None) -> None:
        self.bits = bits
        self.block_size = block_size
        self.content = bytearray(2**bits // 8 if whole is None else whole)

    @property
    def whole(self) -> bytes:
        """All bits."""
        return bytes(self.content)

    def may_have(self, block_hash: bytes) -> bool:
        position = block_position(block_hash, self.bits)
        return bool(self.content[position >> 3] >> (position & 7) & 1)

    def change(self, added: Sequence[int], removed: Sequence[int]) -> None:
        """Sets and clears bits."""
        for position in added:
            self.content[position >> 3] |= 1 << (position & 7)
        for position in removed:
            self.content[position >> 3] &= ~(1 << (position & 7))


class FollowedFilter:
    """An engine's filter as a reader of its events knows it. `last_id` is the id of the last event
    that was read, "" to begin with the first one; `filter` is None while it is unknown."""

    __slots__ = ("_number", "filter", "last_id")

    def __init__(self) -> None:
        self.last_id = ""
        self.filter: BlockFilter | None = None
        self._number = 0

    def follow(self, event_id: str, event: KVEvent) -> None:
        """Applies the next event. If events were lost, the filter is unknown until a whole one."""
        known, self.last_id = self.filter, event_id
        if event.whole is not None:
            self.filter = BlockFilter(event.bits, event.block_size, event.whole)
        elif known is None or (event.number, event.bits) != (self._number + 1, known.bits):
            self.filter = None
        else:
            known.change(event.added, event.removed)
        self._number = event.number


class KVEventWriter(Protocol):
    """Where an engine writes its events. Raises BackendUnavailable."""

    async def write(self, event: KVEvent) -> bool:
        """Writes an event; a whole filter replaces all events before it. Returns False if the
        events before it are lost, so that a whole filter must follow."""

    async def renew(self) -> bool:
        """Keeps the events for longer; returns False if they are lost."""


class KVEventReader(Protocol):
    """Reads the events of engines for gateways. Raises BackendUnavailable."""

    async def read(
        self, model: str, after: Mapping[str, str]
    ) -> Mapping[str, Sequence[tuple[str, bytes]]]:
        """For each engine id in `after`, the ids and contents of the events after the given one,
        the oldest first; "" is before all. A bounded number: the rest comes with the next call."""


def encode_event(event: KVEvent) -> bytes:
    """Packs an event."""
    whole = b"" if event.whole is None else zlib.compress(event.whole, 1)
    added, removed = pack_tokens(event.added), pack_tokens(event.removed)
    head = [PROTOCOL_VERSION, event.number, event.block_size, event.bits]
    return pack_message([*head, whole, added, removed])


def decode_event(data: bytes) -> KVEvent:
    """Unpacks and checks an event. Raises MessageError."""
    if len(data) > MAX_EVENT_BYTES:
        raise MessageError(f"KV event of over {MAX_EVENT_BYTES} bytes")
    _, number, block_size, bits, whole, added, removed, *_ = versioned(data, 7)
    if not MIN_BITS <= count(bits, MAX_BITS) or not count(block_size, MAX_BLOCK_SIZE):
        raise MessageError(f"KV event: a filter of {bits} bits for blocks of {block_size} tokens")
    return KVEvent(
        number=count(number),
        block_size=block_size,
        bits=bits,
        whole=_whole(whole, 2**bits // 8) if whole else None,
        added=_positions(added, bits),
        removed=_positions(removed, bits),
    )


def _whole(data: object, size: int) -> bytes:
    """The filter's bytes, of which there must be `size`."""
    if not isinstance(data, bytes):
        raise MessageError("KV event: a filter must be bytes")
    unpacking = zlib.decompressobj()
    try:
        whole = unpacking.decompress(data, size)
    except zlib.error as error:
        raise MessageError(f"KV event: a filter that is not zlib: {error}") from error
    if len(whole) != size or unpacking.unconsumed_tail:
        raise MessageError(f"KV event: a filter that has not {size} bytes")
    return whole


def _positions(data: object, bits: int) -> Sequence[int]:
    if not isinstance(data, bytes) or len(data) > 4 * MAX_CHANGES:
        raise MessageError(f"KV event: at most {MAX_CHANGES} packed changes")
    positions = unpack_tokens(data)
    if positions and max(positions) >= 2**bits:
        raise MessageError("KV event: a change outside of the filter")
    return positions
