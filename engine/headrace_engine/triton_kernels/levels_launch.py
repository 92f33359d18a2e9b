"""Launch parameters of products with whole numbers of 4 or 8 bits; see `launch`.

For few rows a program has 128 outputs: x, which all of them read, is then less than the weights.
"""

from collections.abc import Iterator
from dataclasses import replace

from .launch import ExpertLaunch, LinearLaunch, SkinnyLaunch

# Rows of a tile at most, also where there are many tiles.
TILE_ROWS = 64
# More rows than these: the weights are made whole once, and multiplied by cuBLAS. Widening 4 bits
# anew for each 64 rows is 3.6 instructions a weight; making them whole moves 4.5 bytes a weight,
# while which an H100 could issue 39, and cuBLAS then has the product alone: even between 700 and
# 1500, by counting.
WIDENED_ROWS = 512

FEW_ROWS = SkinnyLaunch(128, 0, 1, 8, 4)
MORE_ROWS = SkinnyLaunch(128, 0, 1, 8, 3)
FLOATS_32 = SkinnyLaunch(32, 0, 1, 4, 1)
# What is measured beside those, for up to 32 rows and for more.
FEW_TILES = (SkinnyLaunch(64, 0, 1, 4, 4), SkinnyLaunch(128, 0, 1, 8, 3))
MORE_TILES = (SkinnyLaunch(64, 0, 1, 4, 3),)
FEW = 32
# Of experts, few rows and more. Gate and up have sums of their own: more than 32 rows would spill.
TILES = (
    LinearLaunch(16, 64, 0, 4, 4),
    LinearLaunch(16, 128, 0, 8, 4),
    LinearLaunch(32, 64, 0, 4, 3),
)

# In the place of a zero point for all numbers: each group's is read; 4-bit floats (e2m1) have none.
READ, E2M1 = -1, -2

SPLITS = (1, 2, 4, 8)
# Programs that keep an H100 busy; more parts are tried up to the other bound.
ENOUGH_PROGRAMS, MOST_PROGRAMS = 160, 1024


def levels_launch(element_bytes: int, rows: int, outputs: int, steps: int) -> SkinnyLaunch:
    """For so many rows of elements of 2 or 4 bytes; weights of `steps` steps."""
    if element_bytes == 4:
        return FLOATS_32
    tile = FEW_ROWS if rows <= FEW else MORE_ROWS
    programs = -(-outputs // tile.columns) * -(-rows // TILE_ROWS)
    parts = [one for one in SPLITS if one == 1 or 2 * one <= steps]
    enough = (one for one in parts if programs * one >= ENOUGH_PROGRAMS)
    return replace(tile, splits=next(enough, parts[-1]))


def invariant_launch(element_bytes: int) -> SkinnyLaunch:
    """One for all numbers of rows."""
    return FLOATS_32 if element_bytes == 4 else MORE_ROWS


def levels_tile(element_bytes: int, rows: int) -> LinearLaunch:
    """Of products of experts that have so many rows; all sizes but the depth, which the layout of
    the weights decides."""
    if element_bytes == 4:
        return LinearLaunch(16, 32, 0, 4, 1)
    return TILES[0] if rows <= TILES[0].rows else TILES[-1]


def levels_tiles(first: ExpertLaunch, element_bytes: int) -> list[ExpertLaunch]:
    """What may be the fastest for products of experts; `first` is the table's."""
    if element_bytes == 4:
        return [first]
    return list(dict.fromkeys([first, *(ExpertLaunch(tile, tile) for tile in TILES)]))


def levels_candidates(rows: int, outputs: int, steps: int) -> list[SkinnyLaunch]:
    """What may be the fastest for elements of 2 bytes; the first is the table's."""
    first = levels_launch(2, rows, outputs, steps)
    tiles = (FEW_ROWS, *FEW_TILES) if rows <= FEW else (MORE_ROWS, *MORE_TILES)
    return list(
        dict.fromkeys([first, *(one for tile in tiles for one in _cut(tile, outputs, steps))])
    )


def _cut(tile: SkinnyLaunch, outputs: int, steps: int) -> Iterator[SkinnyLaunch]:
    programs = -(-outputs // tile.columns)
    for splits in SPLITS:
        few = splits > 1 and programs * splits > MOST_PROGRAMS
        if 2 * splits <= steps and not few and programs * splits >= ENOUGH_PROGRAMS // 2:
            yield replace(tile, splits=splits)
