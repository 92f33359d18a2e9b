"""A kernel that samples a token of each row, with min_p, top_k and top_p, without a copy to the
host.

A row's scaled logits are at most 0, so the bits of their magnitudes sort like their values. A
filter keeps the tokens up to one such key, which is found by bisection: no row is sorted. One
program has one row, so a row's token does not depend on other rows.
"""

import triton.language as tl

from .jit import jit, jit_unspecialized

# Bits of a key that one pass over the row decides, and the resulting number of passes.
PASS_BITS = tl.constexpr(2)
CUTS = tl.constexpr(4)
PASSES = tl.constexpr(16)
FIRST = tl.constexpr(1 << 30)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@jit
def _keys(x: tl.tensor) -> tl.tensor:
    """uint32 of float32 at most 0: smaller numbers have larger keys; 0 for 0."""
    return (x.to(tl.int32, bitcast=True) & MAGNITUDE).to(tl.uint32)


@jit
def _up_to(
    row: tl.tensor, width: tl.tensor, keys: tl.tensor, COUNTS: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """float32 [CUTS]: the number of elements with keys at or below each of `keys`, or their
    weight."""
    found = tl.zeros([CUTS], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < width, other=-float("inf"))
        weights = (at < width).to(tl.float32) if COUNTS else tl.exp(x)
        inside = _keys(x)[:, None] <= keys[None, :]
        found += tl.sum(tl.where(inside, weights[:, None], 0.0), 0)
    return found


@jit
def _end_of(
    row: tl.tensor,
    width: tl.tensor,
    wanted: tl.tensor,
    passes: tl.tensor,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The smallest key up to which the count or weight of elements is at least `wanted`; the
    largest key if all elements have less. Returns 0 if `passes` is 0."""
    end, one = tl.full([], 0, tl.uint32), tl.full([], FIRST, tl.uint32)
    for _ in range(0, passes):
        cuts = end + tl.arange(0, CUTS).to(tl.uint32) * one + (one - 1)
        short = _up_to(row, width, cuts, COUNTS, BLOCK) < wanted
        below = tl.minimum(tl.sum(short.to(tl.int32), 0), CUTS - 1)
        end += below.to(tl.uint32) * one
        one = one >> PASS_BITS
    return end


@jit
def _sampled_token(
    row: tl.tensor, width: tl.tensor, limit: tl.tensor, number: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """The first index at which the cumulative weight of kept tokens exceeds `number` of the
    total."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < width, other=-float("inf"))
        total += tl.sum(tl.where(_keys(x) <= limit, tl.exp(x), 0.0).to(tl.float64), 0)
    target, before = number * total, tl.full([], 0.0, tl.float64)
    found, last = width + 0, width * 0
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < width, other=-float("inf"))
        weights = tl.where(_keys(x) <= limit, tl.exp(x), 0.0).to(tl.float64)
        above = (before + tl.cumsum(weights, 0) > target) & (weights > 0.0)
        found = tl.minimum(found, tl.min(tl.where(above, at, width), 0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0.0, at, 0), 0))
        before += tl.sum(weights, 0)
    return tl.where(found < width, found, last)  # rounding may leave nothing above


@jit_unspecialized("rows", "width")
def sample_kernel(
    tokens: tl.tensor,
    scaled: tl.tensor,
    limits: tl.tensor,
    numbers: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program (row). tokens int64 [R], scaled float32 [R, V] with a maximum of 0 in each row,
    limits float32 [3, R]: the least scaled logit of min_p, top_k (V: all), top_p (1: all); numbers
    float64 [R]."""
    place = tl.program_id(0).to(tl.int64)
    row = scaled + place * width
    limit = _keys(tl.load(limits + place))
    most, share = tl.load(limits + rows + place), tl.load(limits + 2 * rows + place)
    by_rank = _end_of(row, width, most, tl.where(most < width, PASSES, 0), True, BLOCK)
    limit = tl.where(most < width, tl.minimum(limit, by_rank), limit)
    left = _up_to(row, width, limit + tl.zeros([CUTS], tl.uint32), False, BLOCK)
    wanted = share * tl.max(left, 0)
    by_mass = _end_of(row, width, wanted, tl.where(share < 1.0, PASSES, 0), False, BLOCK)
    limit = tl.where(share < 1.0, tl.minimum(limit, by_mass), limit)
    token = _sampled_token(row, width, limit, tl.load(numbers + place), BLOCK)
    tl.store(tokens + place, token.to(tl.int64))
