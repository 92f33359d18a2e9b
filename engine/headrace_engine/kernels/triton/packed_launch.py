"""Launch parameters of products with packed int4 or int8 weights; see `launch`.

For few rows a program has 128 outputs: then x, which every program reads, is smaller than the
weights.
"""

from collections.abc import Iterator
from dataclasses import replace

from .launch import ExpertLaunch, LinearLaunch, SmallBatchLaunch

# The largest number of rows of a tile, even if there are many tiles.
TILE_ROWS = 64
# For more rows than this the weights are unpacked once and multiplied by cuBLAS. Unpacking 4 bits
# again for each 64 rows takes 3.6 instructions a weight. Unpacking once moves 4.5 bytes a weight;
# in that time an H100 could issue 39 instructions, and then cuBLAS has only the product to compute.
# By this count, both are equal between 700 and 1500 rows.
DEQUANTIZED_ROWS = 512

FEW_ROWS = SmallBatchLaunch(128, 0, 1, 8, 4)
MORE_ROWS = SmallBatchLaunch(128, 0, 1, 8, 3)
FLOATS_32 = SmallBatchLaunch(32, 0, 1, 4, 1)
# Further candidates, for up to 32 rows and for more.
FEW_TILES = (SmallBatchLaunch(64, 0, 1, 4, 4), SmallBatchLaunch(128, 0, 1, 8, 3))
MORE_TILES = (SmallBatchLaunch(64, 0, 1, 4, 3),)
FEW = 32
# For experts, few rows and more. Gate and up have separate sums: more than 32 rows would spill.
TILES = (
    LinearLaunch(16, 64, 0, 4, 4),
    LinearLaunch(16, 128, 0, 8, 4),
    LinearLaunch(32, 64, 0, 4, 3),
)

# Instead of one zero point for all numbers: each group's is read; 4-bit floats (e2m1) have none.
READ, E2M1 = -1, -2

SPLITS = (1, 2, 4, 8)
# The number of programs that keeps an H100 busy; more parts are tried up to the other bound.
ENOUGH_PROGRAMS, MOST_PROGRAMS = 160, 1024


def packed_linear_launch(
    element_bytes: int, rows: int, outputs: int, steps: int
) -> SmallBatchLaunch:
    """For `rows` rows of elements of 2 or 4 bytes; weights of `steps` steps."""
    if element_bytes == 4:
        return FLOATS_32
    tile = FEW_ROWS if rows <= FEW else MORE_ROWS
    programs = -(-outputs // tile.columns) * -(-rows // TILE_ROWS)
    parts = [one for one in SPLITS if one == 1 or 2 * one <= steps]
    enough = (one for one in parts if programs * one >= ENOUGH_PROGRAMS)
    return replace(tile, splits=next(enough, parts[-1]))


def batch_invariant_launch(element_bytes: int) -> SmallBatchLaunch:
    """One launch for all numbers of rows."""
    return FLOATS_32 if element_bytes == 4 else MORE_ROWS


def packed_tile(element_bytes: int, rows: int) -> LinearLaunch:
    """The tile for experts with `rows` rows each, without the depth, which the weights' layout
    decides."""
    if element_bytes == 4:
        return LinearLaunch(16, 32, 0, 4, 1)
    return TILES[0] if rows <= TILES[0].rows else TILES[-1]


def packed_tiles(first: ExpertLaunch, element_bytes: int) -> list[ExpertLaunch]:
    """Tiles that may be the fastest for products of experts; `first` is the table's."""
    if element_bytes == 4:
        return [first]
    return list(dict.fromkeys([first, *(ExpertLaunch(tile, tile) for tile in TILES)]))


def packed_candidates(rows: int, outputs: int, steps: int) -> list[SmallBatchLaunch]:
    """Launches that may be the fastest for elements of 2 bytes; the first is the table's."""
    first = packed_linear_launch(2, rows, outputs, steps)
    tiles = (FEW_ROWS, *FEW_TILES) if rows <= FEW else (MORE_ROWS, *MORE_TILES)
    return list(
        dict.fromkeys([first, *(one for tile in tiles for one in _cut(tile, outputs, steps))])
    )


def _cut(tile: SmallBatchLaunch, outputs: int, steps: int) -> Iterator[SmallBatchLaunch]:
    programs = -(-outputs // tile.columns)
    for splits in SPLITS:
        few = splits > 1 and programs * splits > MOST_PROGRAMS
        if 2 * splits <= steps and not few and programs * splits >= ENOUGH_PROGRAMS // 2:
            yield replace(tile, splits=splits)
