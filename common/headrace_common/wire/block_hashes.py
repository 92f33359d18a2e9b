"""Hashes of a prompt's KV blocks: equal in every engine, and in gateways that place requests.

A block's hash covers all tokens up to its end, the images among them, the cache salt and the
adapter. So blocks with equal hashes have the same KV.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b, sha256

from .images import ImageSpan

HASH_BYTES = 32
# How many bits of a hash a filter tells apart. It has 2**SPARSENESS bits for each block, as far as
# MAX_BITS allows: then under 1 % of them are set.
MIN_BITS, MAX_BITS = 10, 20
SPARSENESS = 7


def prefix_seed(cache_salt: bytes, adapter: str | None) -> bytes:
    """What precedes the first block's hash: with another adapter, the same tokens have other KV."""
    if adapter is None:
        return sha256(cache_salt).digest()
    name = sha256(adapter.encode()).digest()
    return blake2b(cache_salt, digest_size=HASH_BYTES, key=name).digest()


def block_hash(
    before: bytes, token_ids: Sequence[int], images: Iterable[ImageSpan], begin: int, end: int
) -> bytes:
    """SHA-256 of the previous block's hash (the first block: of the seed), the tokens [begin, end),
    and the images among them.

    Collision-resistant, since a forged hit would give one user's context to another.
    """
    content = array("q", token_ids[begin:end]).tobytes()
    if images:
        content += _image_keys(images, begin, end)
    return sha256(before + content).digest()


def filter_bits(blocks: int) -> int:
    """The number of bits of a hash that the filter of `blocks` blocks tells apart."""
    return min(MAX_BITS, max(MIN_BITS, (blocks - 1).bit_length() + SPARSENESS))


def block_position(block_hash: bytes, bits: int) -> int:
    """The first `bits` bits of a hash, at most 32, as a number."""
    return int.from_bytes(block_hash[:4], "big") >> (32 - bits)


def _image_keys(images: Iterable[ImageSpan], begin: int, end: int) -> bytes:
    """Tells the positions [begin, end) of a prompt from those with other images: their tokens are
    the same. Empty without an image there."""
    return b"".join(
        span.digest + (span.start - begin).to_bytes(8, "little", signed=True)
        for span in images
        if span.start < end and span.end > begin
    )
