"""Assigns tokens to experts and sorts them, on the device.

The router's logits become pairs of a token and an expert; a counting sort orders pairs by
expert, and each expert's pairs are split into tiles. The host knows only the largest possible
number of tiles, so a recorded step is valid for any routing. No atomics: the order is always the
same.
"""

import triton.language as tl

from .jit import await_earlier, jit, jit_unspecialized


@jit
def _lay_out(
    order: tl.tensor,
    tiles: tl.tensor,
    live: tl.tensor,
    choice: tl.tensor,
    rows: tl.tensor,
    before: tl.tensor,
    total: tl.tensor,
    capacity: tl.tensor,
    PER_TOKEN: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Writes the places of these rows' pairs, and this program's share of the tiles, in which
    experts are numbered from FIRST on.

    choice [TOKENS, BLOCK] is k + 1 if an expert is a row's k-th, else 0. `before` [BLOCK] counts
    each expert's pairs in the rows of earlier programs, `total` [BLOCK] in all rows.
    """
    lanes = tl.arange(0, BLOCK)
    starts = tl.cumsum(total, 0) - total
    taken = choice > 0
    places = tl.cumsum(taken.to(tl.int32), 0) - 1 + (starts + before)[None, :]
    tl.store(order + places, rows[:, None] * PER_TOKEN + choice - 1, mask=taken)
    blocks = tl.cdiv(total, ROWS)
    first = tl.cumsum(blocks, 0) - blocks
    for number in range(tl.program_id(0), tl.max(blocks, 0), tl.num_programs(0)):
        own = number < blocks
        at = tiles + first + number
        tl.store(at, lanes - FIRST, mask=own)
        tl.store(at + capacity, starts + number * ROWS, mask=own)
        tl.store(at + 2 * capacity, starts + total, mask=own)
    if tl.program_id(0) == 0:
        tl.store(live, tl.sum(blocks, 0))


@jit
def _of_best_groups(
    ranked: tl.tensor,
    lanes: tl.tensor,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """ranked [TOKENS, BLOCK] with -inf outside the best groups of SIZE adjacent experts."""
    groups = (lanes // SIZE)[None, :]
    totals = tl.where(groups < GROUPS, ranked, float("-inf"))
    for group in range(GROUPS):  # not unrolled: it would compile for minutes
        own = tl.where(groups == group, ranked, float("-inf"))
        total = tl.max(own, 1)[:, None]
        if GROUP_BEST > 1:
            first = tl.min(tl.where(own == total, lanes[None, :], BLOCK), 1)[:, None]
            total += tl.max(tl.where(lanes[None, :] == first, float("-inf"), own), 1)[:, None]
        totals = tl.where(groups == group, total, totals)
    kept = tl.zeros_like(ranked)
    for _ in range(KEPT_GROUPS):
        most = tl.max(totals, 1)[:, None]
        best = tl.min(tl.where(totals == most, groups, BLOCK), 1)[:, None]
        kept = tl.where(groups == best, 1.0, kept)
        totals = tl.where(groups == best, float("-inf"), totals)
    return tl.where(kept > 0.0, ranked, float("-inf"))


@jit_unspecialized("tokens", "capacity")
def route_kernel(
    weights: tl.tensor,
    choices: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    live: tl.tensor,
    logits: tl.tensor,
    slots: tl.tensor,
    correction: tl.tensor,
    tokens: tl.tensor,
    capacity: tl.tensor,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    FACTOR: tl.constexpr,
    PADDED: tl.constexpr,
    FIRST: tl.constexpr,
    LOCAL: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ALONE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (`TOKENS` tokens): logits [T, EXPERTS] to weights [T, PER_TOKEN].

    With CORRECTED correction [EXPERTS] is added to the scores that choose. With GROUPS above 1 only
    the KEPT_GROUPS best groups are chosen from. Of equal scores the expert with the lower number
    wins; a row of NaN has weights of NaN. With PADDED rows with slots [T] below 0 have no expert.
    Only the LOCAL experts from FIRST on are in this process: pairs of others have weights of 0 and
    no place.
    With ALONE one program has all tokens and sorts them. Otherwise each writes the input of
    place_kernel: choices uint8 [T, EXPERTS], k + 1 for a row's k-th expert, else 0; counts
    [programs, EXPERTS].
    """
    await_earlier(DEPENDENT)
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    lanes = tl.arange(0, BLOCK)
    given = (rows < tokens)[:, None]
    real = (lanes < EXPERTS)[None, :]
    spot = rows.to(tl.int64)[:, None] * EXPERTS + lanes[None, :]
    wide = tl.load(logits + spot, mask=given & real, other=0.0).to(tl.float32)
    wide = tl.where(real, wide, float("-inf"))
    if SIGMOID:
        shares = tl.sigmoid(wide)
    else:
        shares = tl.exp(wide - tl.max(wide, 1)[:, None])
        shares = shares / tl.sum(shares, 1)[:, None]
    ranked = shares
    if CORRECTED:
        ranked += tl.load(correction + lanes, mask=lanes < EXPERTS, other=0.0)[None, :]
    # Every pair needs a different expert, even if the model returned NaN.
    left = tl.where(real, tl.where(ranked == ranked, ranked, 0.0), float("-inf"))
    if GROUPS > 1:
        left = _of_best_groups(
            left, lanes, GROUPS, KEPT_GROUPS, GROUP_BEST, EXPERTS // GROUPS, BLOCK
        )
    choice = tl.zeros([TOKENS, BLOCK], tl.int32)
    for k in tl.static_range(PER_TOKEN):
        best = tl.max(left, 1)[:, None]
        expert = tl.min(tl.where(left == best, lanes[None, :], BLOCK), 1)
        picked = lanes[None, :] == expert[:, None]
        choice = tl.where(picked, k + 1, choice)
        left = tl.where(picked, float("-inf"), left)
    if RENORMALISE:
        shares = shares / tl.sum(tl.where(choice > 0, shares, 0.0), 1)[:, None]
    if FACTOR != 1.0:
        shares = shares * FACTOR
    if PADDED:
        given = given & (tl.load(slots + rows, mask=rows < tokens, other=-1) >= 0)[:, None]
    choice = tl.where(given, choice, 0)
    pairs = rows[:, None] * PER_TOKEN + choice - 1
    if LOCAL < EXPERTS:
        local = ((lanes >= FIRST) & (lanes < FIRST + LOCAL))[None, :]
        tl.store(weights + pairs, tl.where(local, shares, 0.0), mask=choice > 0)
        choice = tl.where(local, choice, 0)
    else:
        tl.store(weights + pairs, shares, mask=choice > 0)
    count = tl.sum((choice > 0).to(tl.int32), 0)
    if ALONE:
        none = tl.zeros([BLOCK], tl.int32)
        _lay_out(
            order, tiles, live, choice, rows, none, count, capacity, PER_TOKEN, FIRST, ROWS, BLOCK
        )  # fmt: skip
    else:
        tl.store(choices + spot, choice.to(tl.uint8), mask=(rows < tokens)[:, None] & real)
        tl.store(counts + tl.program_id(0) * EXPERTS + lanes, count, mask=lanes < EXPERTS)


@jit_unspecialized("tokens", "programs", "capacity")
def place_kernel(
    order: tl.tensor,
    tiles: tl.tensor,
    live: tl.tensor,
    choices: tl.tensor,
    counts: tl.tensor,
    tokens: tl.tensor,
    programs: tl.tensor,
    capacity: tl.tensor,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    FIRST: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (`TOKENS` tokens), one for each program that has counted: sorts their choices.

    order [T * PER_TOKEN] are pairs by expert. tiles [3, capacity] are each tile's expert, numbered
    from FIRST on, the begin of its pairs in `order`, and its expert's end there; `live` [1] is the
    number of tiles.
    """
    await_earlier(DEPENDENT)
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    lanes = tl.arange(0, BLOCK)
    mask = (rows < tokens)[:, None] & (lanes < EXPERTS)[None, :]
    spot = rows.to(tl.int64)[:, None] * EXPERTS + lanes[None, :]
    choice = tl.load(choices + spot, mask=mask, other=0).to(tl.int32)
    before = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, programs, TOKENS):
        at = start + tl.arange(0, TOKENS)
        mask = (at < programs)[:, None] & (lanes < EXPERTS)[None, :]
        found = tl.load(counts + at[:, None] * EXPERTS + lanes[None, :], mask=mask, other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where((at < tl.program_id(0))[:, None], found, 0), 0)
    _lay_out(
        order, tiles, live, choice, rows, before, total, capacity, PER_TOKEN, FIRST, ROWS, BLOCK
    )  # fmt: skip
