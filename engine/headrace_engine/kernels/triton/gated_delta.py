"""Gated delta nets (https://arxiv.org/abs/2412.06464), without the matrix products before and
after them.

Short runs are computed token by token in one launch. Longer runs are cut into chunks, which are
computed by matrix products. Let g be the cumulative sums of a chunk's logarithmic decays, and
A[i, j] = beta_i (k_i k_j) exp(g_i - g_j) for j < i. The inverse of I + A gives each token's change
of the state if the state before the chunk is zero. A second kernel passes a head's state from chunk
to chunk. If each key channel has its own decay (Kimi Delta Attention), all runs are computed token
by token.
"""

import triton.language as tl

from .convolution import convolved, write_windows
from .jit import await_earlier, jit, jit_unspecialized
from .states import clamped, matrix_places, silu, softplus


@jit
def gated_norm(
    found: tl.tensor,
    gate: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    SIGMOID: tl.constexpr,
) -> tl.tensor:
    """The RMS norm of each row of `found` [T, WIDTH] with zeros after it, times silu(gate) or
    sigmoid(gate)."""
    scale = tl.rsqrt(tl.sum(found * found, 1) / WIDTH + eps)
    factor = tl.sigmoid(gate) if SIGMOID else silu(gate)
    return found * scale[:, None] * norm[None, :] * factor


@jit
def head_scale(x: tl.tensor) -> tl.tensor:
    """The factors [T] that scale the rows of x [T, K] to length 1."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)


@jit
def token_decay(
    decay: tl.tensor, rates: tl.tensor, dt_bias: tl.tensor, head: tl.tensor
) -> tl.tensor:
    """The logarithm of the factor by which a head's state decays at a token."""
    raised = decay.to(tl.float32) + tl.load(dt_bias + head)
    return tl.load(rates + head) * softplus(raised)


@jit
def kept_share(
    decay: tl.tensor,
    rates: tl.tensor,
    dt_bias: tl.tensor,
    head: tl.tensor,
    keys: tl.tensor,
    KEY_DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
) -> tl.tensor:
    """The factor by which a head's state decays at a token: one number [1, 1], or one for each key
    channel [K, 1]."""
    if BY_CHANNEL:
        at = head * KEY_DIM + keys
        raised = tl.load(decay + at, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
        raised += tl.load(dt_bias + at, mask=keys < KEY_DIM, other=0.0)
        found = tl.exp(tl.load(rates + head) * softplus(raised))[:, None]
    else:
        raised = tl.load(decay + head + tl.arange(0, 1))
        found = tl.exp(token_decay(raised, rates, dt_bias, head))[:, None]
    return found


@jit_unspecialized("sources", "targets", "stride")
def gated_delta_kernel(
    output: tl.tensor,
    mixed: tl.tensor,
    gate: tl.tensor,
    beta: tl.tensor,
    decay: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    rates: tl.tensor,
    dt_bias: tl.tensor,
    norm: tl.tensor,
    window_pages: tl.tensor,
    window_more: tl.tensor,
    pages: tl.tensor,
    more: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    fresh: tl.tensor,
    starts: tl.tensor,
    write_starts: tl.tensor,
    write_ends: tl.tensor,
    write_rows: tl.tensor,
    sequences: tl.tensor,
    mixed_stride: tl.tensor,
    gate_stride: tl.tensor,
    beta_stride: tl.tensor,
    decay_stride: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    WINDOW_ELEMENTS: tl.constexpr,
    WINDOW_MORE: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    FIRST: tl.constexpr,
    ELEMENTS: tl.constexpr,
    MORE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (sequence of `sequences`, key head): advances the states of the SHARED value heads of
    a key head through a sequence's tokens. No two programs use the same channels of a window.

    BY_CHANNEL: `decay` [T, Hv * K] has a decay for each key channel, and gates are sigmoids.
    """
    await_earlier(DEPENDENT)
    sequence = tl.load(sequences + tl.program_id(0)).to(tl.int64)
    key_head = tl.program_id(1)
    begin, is_fresh = tl.load(starts + sequence), tl.load(fresh + sequence)
    source = sources + sequence * stride
    first_write = tl.load(write_starts + sequence)
    end_write = tl.load(write_starts + sequence + 1)
    keys, values = tl.arange(0, KEYS), tl.arange(0, VALUES)
    is_key, is_value = (keys < KEY_DIM)[None, :], (values < VALUE_DIM)[None, :]
    is_element = (keys < KEY_DIM)[:, None] & is_value
    query_channels = key_head * KEY_DIM + clamped(keys, KEY_DIM, KEYS)
    key_channels = KEY_HEADS * KEY_DIM + query_channels
    weights = tl.load(norm + values, mask=values < VALUE_DIM, other=0.0).to(tl.float32)
    for number in range(SHARED):
        head = key_head * SHARED + number
        value_channels = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
        value_channels += clamped(values, VALUE_DIM, VALUES)
        places = matrix_places(
            pages, more, source, head, keys, values, FIRST, KEY_DIM, VALUE_DIM, ELEMENTS, MORE
        )
        state = tl.load(places, mask=is_element & (is_fresh == 0), other=0.0)
        at = begin
        for write in range(first_write, end_write):
            end = tl.load(write_ends + write)
            for _ in range(at, end):
                one = at + tl.arange(0, 1)
                query = convolved(
                    mixed, mixed_stride, one, query_channels, is_key, begin, is_fresh,
                    window_pages, window_more, source, weight, bias,
                    SIZE, WINDOW_ELEMENTS, WINDOW_MORE,
                )  # fmt: skip
                key = convolved(
                    mixed, mixed_stride, one, key_channels, is_key, begin, is_fresh,
                    window_pages, window_more, source, weight, bias,
                    SIZE, WINDOW_ELEMENTS, WINDOW_MORE,
                )  # fmt: skip
                value = convolved(
                    mixed, mixed_stride, one, value_channels, is_value, begin, is_fresh,
                    window_pages, window_more, source, weight, bias,
                    SIZE, WINDOW_ELEMENTS, WINDOW_MORE,
                )  # fmt: skip
                row = at.to(tl.int64)
                query = tl.where(is_key, silu(query), 0.0)
                query = tl.sum(query * (head_scale(query) * KEY_DIM**-0.5)[:, None], 0)
                key = tl.where(is_key, silu(key), 0.0)
                key = tl.sum(key * head_scale(key)[:, None], 0)[:, None]
                state *= kept_share(
                    decay + row * decay_stride, rates, dt_bias, head, keys, KEY_DIM, BY_CHANNEL
                )
                share = tl.sigmoid(tl.load(beta + row * beta_stride + head).to(tl.float32))
                known = tl.sum(state * key, 0)[None, :]
                state += key * ((tl.where(is_value, silu(value), 0.0) - known) * share)
                found = tl.sum(state * query[:, None], 0)[None, :]
                gates = tl.load(
                    gate + row * gate_stride + head * VALUE_DIM + values[None, :],
                    mask=is_value,
                    other=0.0,
                )
                made = gated_norm(found, gates.to(tl.float32), weights, eps, VALUE_DIM, BY_CHANNEL)
                line = output + (row * KEY_HEADS * SHARED + head) * VALUE_DIM
                tl.store(line + values[None, :], made, mask=is_value)
                at += 1
            target = targets + tl.load(write_rows + write).to(tl.int64) * stride
            if tl.load(target) >= 0:
                places = matrix_places(
                    pages, more, target, head, keys, values,
                    FIRST, KEY_DIM, VALUE_DIM, ELEMENTS, MORE,
                )  # fmt: skip
                tl.store(places, state, mask=is_element)
        write_windows(
            mixed, mixed_stride, sequence, value_channels, is_value, begin, is_fresh,
            window_pages, window_more, source, targets, write_starts, write_ends, write_rows,
            stride, SIZE, TAPS, WINDOW_ELEMENTS, WINDOW_MORE,
        )  # fmt: skip
    for number in range(2):
        write_windows(
            mixed, mixed_stride, sequence, query_channels + number * KEY_HEADS * KEY_DIM, is_key,
            begin, is_fresh, window_pages, window_more, source, targets,
            write_starts, write_ends, write_rows,
            stride, SIZE, TAPS, WINDOW_ELEMENTS, WINDOW_MORE,
        )  # fmt: skip


@jit
def load_heads(
    rows: tl.tensor,
    tokens: tl.tensor,
    end: tl.tensor,
    channels: tl.tensor,
    exists: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """A tile [tokens, channels] of rows [T, WIDTH]; zeros for tokens from `end` on, and for
    channels that do not exist."""
    mask = (tokens < end)[:, None] & exists[None, :]
    line = rows + tokens.to(tl.int64)[:, None] * WIDTH
    return tl.load(line + channels[None, :], mask=mask, other=0.0)


@jit
def chunk_decays(
    decay: tl.tensor,
    stride: tl.tensor,
    tokens: tl.tensor,
    end: tl.tensor,
    head: tl.tensor,
    rates: tl.tensor,
    dt_bias: tl.tensor,
) -> tl.tensor:
    """The cumulative sums [T] of a head's logarithmic decays in a chunk. After the chunk's end they
    stay constant."""
    mask = tokens < end
    found = tl.load(decay + tokens.to(tl.int64) * stride + head, mask=mask, other=0.0)
    return tl.cumsum(tl.where(mask, token_decay(found, rates, dt_bias, head), 0.0), 0)


@jit
def lower_factors(sums: tl.tensor, rows: tl.tensor) -> tl.tensor:
    """exp(sums_i - sums_j) [T, T] for j <= i, zeros elsewhere."""
    kept = rows[:, None] >= rows[None, :]
    return tl.where(kept, tl.exp(tl.where(kept, sums[:, None] - sums[None, :], 0.0)), 0.0)


@jit
def delta_chunk_kernel(
    changes: tl.tensor,
    lookups: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    beta: tl.tensor,
    decay: tl.tensor,
    rates: tl.tensor,
    dt_bias: tl.tensor,
    chunk_starts: tl.tensor,
    chunk_ends: tl.tensor,
    beta_stride: tl.tensor,
    decay_stride: tl.tensor,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TOKENS: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (chunk, value head): writes `changes` [T, Hv, V], the changes by the chunk's tokens
    if the state before the chunk is zero, and `lookups` [T, Hv, K], the keys with which that state
    is read. Writes the factors of queries and keys to `scales` [T, 2 Hk]."""
    await_earlier(DEPENDENT)
    chunk, head = tl.program_id(0), tl.program_id(1)
    end, at = tl.load(chunk_ends + chunk), tl.arange(0, TOKENS)
    tokens = tl.load(chunk_starts + chunk) + at
    keys, values = tl.arange(0, KEYS), tl.arange(0, VALUES)
    WIDTH: tl.constexpr = (2 * KEY_DIM + SHARED * VALUE_DIM) * KEY_HEADS
    kind = rows.dtype.element_ty
    group, inside = head // SHARED, tokens < end
    key_channels = (KEY_HEADS + group) * KEY_DIM + keys
    key = load_heads(rows, tokens, end, key_channels, keys < KEY_DIM, WIDTH)
    lengths = scales + tokens.to(tl.int64) * (2 * KEY_HEADS) + group
    key_scale = head_scale(key)
    if head % SHARED == 0:
        query = load_heads(rows, tokens, end, group * KEY_DIM + keys, keys < KEY_DIM, WIDTH)
        tl.store(lengths, head_scale(query) * KEY_DIM**-0.5, mask=inside)
        tl.store(lengths + KEY_HEADS, key_scale, mask=inside)
    share = tl.load(beta + tokens.to(tl.int64) * beta_stride + head, mask=inside, other=0.0)
    share = tl.sigmoid(share.to(tl.float32))
    sums = chunk_decays(decay, decay_stride, tokens, end, head, rates, dt_bias)
    products = tl.dot(key, tl.trans(key), input_precision=EXACT)
    products *= lower_factors(sums, at) * (share * key_scale)[:, None] * key_scale[None, :]
    products = tl.where(at[:, None] > at[None, :], products, 0.0)
    inverse = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    for row in range(1, TOKENS):
        chosen = (at == row)[:, None]
        line = tl.sum(tl.where(chosen, products, 0.0), 0)
        inverse -= tl.where(chosen, tl.sum(line[:, None] * inverse, 0)[None, :], 0.0)
    line = tokens.to(tl.int64)[:, None] * (KEY_HEADS * SHARED) + head
    scaled = (inverse * (share * key_scale * tl.exp(sums))[None, :]).to(kind)
    found = tl.dot(scaled, key, input_precision=EXACT)
    mask = inside[:, None] & (keys < KEY_DIM)[None, :]
    tl.store(lookups + line * KEY_DIM + keys[None, :], found, mask=mask)
    value_channels = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values
    value = load_heads(rows, tokens, end, value_channels, values < VALUE_DIM, WIDTH)
    found = tl.dot((inverse * share[None, :]).to(kind), value, input_precision=EXACT)
    mask = inside[:, None] & (values < VALUE_DIM)[None, :]
    tl.store(changes + line * VALUE_DIM + values[None, :], found, mask=mask)


@jit_unspecialized("sources", "targets", "stride")
def delta_states_kernel(
    changes: tl.tensor,
    lookups: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    decay: tl.tensor,
    rates: tl.tensor,
    dt_bias: tl.tensor,
    pages: tl.tensor,
    more: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    fresh: tl.tensor,
    starts: tl.tensor,
    write_starts: tl.tensor,
    write_ends: tl.tensor,
    write_rows: tl.tensor,
    sequences: tl.tensor,
    decay_stride: tl.tensor,
    stride: tl.tensor,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
    ELEMENTS: tl.constexpr,
    MORE: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (sequence of `sequences`, value head, COLUMNS of its state): advances a state through
    a sequence's chunks. The heads' outputs replace `changes`."""
    await_earlier(DEPENDENT)
    sequence, head = tl.load(sequences + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    keys = tl.arange(0, KEYS)
    values = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_element = (keys < KEY_DIM)[:, None] & (values < VALUE_DIM)[None, :]
    WIDTH: tl.constexpr = (2 * KEY_DIM + SHARED * VALUE_DIM) * KEY_HEADS
    kind = rows.dtype.element_ty
    query_channels = head // SHARED * KEY_DIM + keys
    rank = tl.arange(0, TOKENS)
    at, is_fresh = tl.load(starts + sequence), tl.load(fresh + sequence)
    places = matrix_places(
        pages, more, sources + sequence * stride, head, keys, values,
        FIRST, KEY_DIM, VALUE_DIM, ELEMENTS, MORE,
    )  # fmt: skip
    state = tl.load(places, mask=is_element & (is_fresh == 0), other=0.0)
    for write in range(tl.load(write_starts + sequence), tl.load(write_starts + sequence + 1)):
        end = tl.load(write_ends + write)
        for first in range(at, end, TOKENS):
            tokens = first + rank
            query = load_heads(rows, tokens, end, query_channels, keys < KEY_DIM, WIDTH)
            key = load_heads(
                rows, tokens, end, query_channels + KEY_HEADS * KEY_DIM, keys < KEY_DIM, WIDTH
            )
            own_scales = scales + tokens.to(tl.int64) * (2 * KEY_HEADS) + head // SHARED
            query_scale = tl.load(own_scales, mask=tokens < end, other=0.0)
            key_scale = tl.load(own_scales + KEY_HEADS, mask=tokens < end, other=0.0)
            sums = chunk_decays(decay, decay_stride, tokens, end, head, rates, dt_bias)
            line = tokens.to(tl.int64)[:, None] * (KEY_HEADS * SHARED) + head
            inside = (tokens < end)[:, None]
            lookup = tl.load(
                lookups + line * KEY_DIM + keys[None, :],
                mask=inside & (keys < KEY_DIM)[None, :],
                other=0.0,
            )
            own = changes + line * VALUE_DIM + values[None, :]
            mask = inside & (values < VALUE_DIM)[None, :]
            known = state.to(kind)
            change = tl.load(own, mask=mask, other=0.0).to(tl.float32)
            change -= tl.dot(lookup, known, input_precision=EXACT)
            scores = tl.dot(query, tl.trans(key), input_precision=EXACT)
            scores *= lower_factors(sums, rank) * key_scale[None, :]
            found = tl.dot(query, known, input_precision=EXACT) * tl.exp(sums)[:, None]
            found = tl.dot(scores.to(kind), change.to(kind), found, input_precision=EXACT)
            tl.store(own, found * query_scale[:, None], mask=mask)
            last = tl.min(sums, 0)
            change *= (key_scale * tl.exp(last - sums))[:, None]
            state *= tl.exp(last)
            state = tl.dot(tl.trans(key), change.to(kind), state, input_precision=EXACT)
        target = targets + tl.load(write_rows + write).to(tl.int64) * stride
        if tl.load(target) >= 0:
            places = matrix_places(
                pages, more, target, head, keys, values,
                FIRST, KEY_DIM, VALUE_DIM, ELEMENTS, MORE,
            )  # fmt: skip
            tl.store(places, state, mask=is_element)
        at = end


@jit
def delta_gate_kernel(
    output: tl.tensor,
    found: tl.tensor,
    gate: tl.tensor,
    norm: tl.tensor,
    chunk_starts: tl.tensor,
    chunk_ends: tl.tensor,
    gate_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (chunk, value head): the gated norms of `found` [T, HEADS, VALUE_DIM]."""
    await_earlier(DEPENDENT)
    chunk, head = tl.program_id(0), tl.program_id(1)
    values = tl.arange(0, VALUES)
    channels = head * VALUE_DIM + values
    weights = tl.load(norm + values, mask=values < VALUE_DIM, other=0.0).to(tl.float32)
    end = tl.load(chunk_ends + chunk)
    for first in range(tl.load(chunk_starts + chunk), end, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        mask = (tokens < end)[:, None] & (values < VALUE_DIM)[None, :]
        line = tokens.to(tl.int64)[:, None] * (HEADS * VALUE_DIM)
        own = tl.load(found + line + channels[None, :], mask=mask, other=0.0).to(tl.float32)
        place = gate + tokens.to(tl.int64)[:, None] * gate_stride + channels[None, :]
        gates = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        made = gated_norm(own, gates, weights, eps, VALUE_DIM, False)
        tl.store(output + line + channels[None, :], made, mask=mask)
