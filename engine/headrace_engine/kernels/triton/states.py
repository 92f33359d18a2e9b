"""Tiles of recurrent states, whose elements are scattered over blocks of the KV cache.

The first ELEMENTS of a block are in `pages`, the next MORE in `more`. `blocks` points to the
numbers of a state's blocks. A state is written only if its first block number is not negative: a
CUDA graph contains writes that a batch may not need.
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
    """Pointers to elements of a state. All elements must exist."""
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
    """Pointers [rows, columns] to elements of a matrix [ROWS, COLUMNS]. `matrix` is the number of
    the matrix in the state; matrix 0 begins at element FIRST. Pointers to rows or columns that do
    not exist must not be used."""
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
    """`numbers`, with COUNT - 1 in place of larger ones. If COUNT is a multiple of ROOM, there are
    no larger ones, and the numbers are not changed, so that loads stay wide."""
    found = numbers
    if COUNT % ROOM != 0:
        found = tl.minimum(numbers, COUNT - 1)
    return found
