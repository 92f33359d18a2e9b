"""Log probabilities of whole prompts as bytes: eight bytes for each token and each alternative.

Little-endian: the number of alternatives per position (uint32), then for all positions the log
probabilities (float32), ranks (uint32), the alternatives' ids (uint32) and values (float32).
"""

import sys
from array import array
from collections.abc import Iterable, Sequence

from ..errors import MessageError
from ..sampling.params import MAX_LOGPROBS, MAX_PROMPT_LOGPROB_ENTRIES
from .messages import Logprobs, pack_tokens, unpack_tokens

HEAD_BYTES = 4
ENTRY_BYTES = 8


def pack_prompt_logprobs(positions: Sequence[Logprobs]) -> bytes:
    """Packs log probabilities; all positions must have as many alternatives as the first."""
    count = len(positions[0].top) if positions else 0
    pairs = [pair for position in positions for pair in position.top]
    assert len(pairs) == count * len(positions), "each position has as many alternatives"
    return b"".join(
        (
            pack_tokens([count]),
            _pack_floats(position.logprob for position in positions),
            pack_tokens([position.rank for position in positions]),
            pack_tokens([token for token, _ in pairs]),
            _pack_floats(value for _, value in pairs),
        )
    )


def unpack_prompt_logprobs(data: object) -> tuple[Logprobs, ...]:
    """Inverse of pack_prompt_logprobs. Raises MessageError."""
    if not isinstance(data, bytes) or len(data) < HEAD_BYTES:
        raise MessageError("log probabilities of a prompt must be packed bytes")
    (count,) = unpack_tokens(data[:HEAD_BYTES])
    size, rest = divmod(len(data) - HEAD_BYTES, ENTRY_BYTES * (count + 1))
    if rest or count > MAX_LOGPROBS or size * (count + 1) > MAX_PROMPT_LOGPROB_ENTRIES:
        raise MessageError(
            f"log probabilities of a prompt: {len(data)} bytes are not whole positions"
        )
    logprobs = _unpack_floats(data, HEAD_BYTES, size)
    ranks = unpack_tokens(data[HEAD_BYTES + 4 * size : HEAD_BYTES + 8 * size])
    begin, pairs = HEAD_BYTES + 8 * size, size * count
    tokens = unpack_tokens(data[begin : begin + 4 * pairs])
    values = _unpack_floats(data, begin + 4 * pairs, pairs)
    top = tuple(zip(tokens, values, strict=True))
    return tuple(
        Logprobs(logprob, rank, top[place * count : (place + 1) * count])
        for place, (logprob, rank) in enumerate(zip(logprobs, ranks, strict=True))
    )


def _pack_floats(values: Iterable[float]) -> bytes:
    packed = array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack_floats(data: bytes, begin: int, count: int) -> "array[float]":
    packed = array("f")
    packed.frombytes(data[begin : begin + 4 * count])
    if sys.byteorder == "big":
        packed.byteswap()
    return packed
