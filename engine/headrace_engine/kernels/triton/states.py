"""Tiles of recurrent states, whose elements are scattered over blocks of the KV cache.

A block has ELEMENTS elements in `pages`, then MORE elements in `more`. A state's blocks are listed
at `blocks`. Memory is written only if the first of its blocks is not negative, so that recorded
steps can have writes that are not wanted.
"""

import triton.language as tl

from .jit import jit


@jit
def state_places(
    pages: tl.tensor,
    more: tl.tensor,
    blocks: tl.tensor,
    elements: tl.tensor,
    ELEMENTS: tl.constexpr,
    MORE: tl.constexpr,
) -> tl.tensor:
    """Pointers to elements of a state; all of them exist."""
    inside = elements % (ELEMENTS + MORE)
    block = tl.load(blocks + elements // (ELEMENTS + MORE)).to(tl.int64)
    places = pages + block * ELEMENTS + inside
    if MORE > 0:
        second = more + block * MORE + (inside - ELEMENTS)
        places = tl.where(inside < ELEMENTS, places, second)
    return places


@jit
def matrix_places(
    pages: tl.tensor,
    more: tl.tensor,
    blocks: tl.tensor,
    matrix: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    MORE: tl.constexpr,
) -> tl.tensor:
    """Pointers to `rows` and `columns` of matrix [ROWS, COLUMNS] number `matrix`. The first matrix
    begins at element FIRST. Pointers to what does not exist must not be used."""
    begin = FIRST + matrix * (ROWS * COLUMNS)
    lines = begin + tl.minimum(rows, ROWS - 1) * COLUMNS
    if FIRST % COLUMNS == 0 and ELEMENTS % COLUMNS == 0 and MORE % COLUMNS == 0:
        # A row is never cut, so only its beginning has to be found.
        starts = state_places(pages, more, blocks, lines, ELEMENTS, MORE)
        places = starts[:, None] + columns[None, :]
    else:
        elements = lines[:, None] + tl.minimum(columns, COLUMNS - 1)[None, :]
        places = state_places(pages, more, blocks, elements, ELEMENTS, MORE)
    return places


@jit
def softplus(x: tl.tensor) -> tl.tensor:
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@jit
def silu(x: tl.tensor) -> tl.tensor:
    return x * tl.sigmoid(x)


@jit
def clamped(numbers: tl.tensor, COUNT: tl.constexpr, ROOM: tl.constexpr) -> tl.tensor:
    """The numbers below COUNT; the last one instead of others. Unchanged if COUNT is a multiple of
    ROOM, so that loads stay wide."""
    found = numbers
    if COUNT % ROOM != 0:
        found = tl.minimum(numbers, COUNT - 1)
    return found
