"""Launch parameters of products with packed int4 or int8 weights; see `launch`.

Every program reads all of x. For few rows a program computes 128 outputs, so that x is smaller than
the weights that the program reads.
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

FEW_ROWS_LAUNCH = SmallBatchLaunch(128, 0, 1, 8, 4)
MANY_ROWS_LAUNCH = SmallBatchLaunch(128, 0, 1, 8, 3)
FLOAT32_LAUNCH = SmallBatchLaunch(32, 0, 1, 4, 1)
# Further candidates to measure: up to ROWS_BOUND rows, and above.
FEW_ROWS_CANDIDATES = (SmallBatchLaunch(64, 0, 1, 4, 4), SmallBatchLaunch(128, 0, 1, 8, 3))
MANY_ROWS_CANDIDATES = (SmallBatchLaunch(64, 0, 1, 4, 3),)
ROWS_BOUND = 32
# Tiles of experts, from few rows to many. Gate and up have separate accumulators, so more than 32
# rows would not fit the registers.
EXPERT_TILES = (
    LinearLaunch(16, 64, 0, 4, 4),
    LinearLaunch(16, 128, 0, 8, 4),
    LinearLaunch(32, 64, 0, 4, 3),
)

# Values in place of one zero point for all numbers: READ, the kernel reads each group's own; E2M1,
# the numbers are 4-bit floats, which have no zero point.
READ, E2M1 = -1, -2

SPLITS = (1, 2, 4, 8)
# MIN_PROGRAMS keep an H100 busy. Candidates with more parts have at most MAX_PROGRAMS.
MIN_PROGRAMS, MAX_PROGRAMS = 160, 1024


def packed_linear_launch(
    element_bytes: int, rows: int, outputs: int, steps: int
) -> SmallBatchLaunch:
    """The launch for `rows` rows of elements of 2 or 4 bytes, and inputs that take `steps`
    steps."""
    if element_bytes == 4:
        return FLOAT32_LAUNCH
    tile = FEW_ROWS_LAUNCH if rows <= ROWS_BOUND else MANY_ROWS_LAUNCH
    programs = -(-outputs // tile.columns) * -(-rows // TILE_ROWS)
    parts = [one for one in SPLITS if one == 1 or 2 * one <= steps]
    enough = (one for one in parts if programs * one >= MIN_PROGRAMS)
    return replace(tile, splits=next(enough, parts[-1]))


def batch_invariant_launch(element_bytes: int) -> SmallBatchLaunch:
    """The one launch for every number of rows."""
    return FLOAT32_LAUNCH if element_bytes == 4 else MANY_ROWS_LAUNCH


def packed_tile(element_bytes: int, rows: int) -> LinearLaunch:
    """The tile for experts with `rows` rows each, without the depth, which the weights' layout
    decides."""
    if element_bytes == 4:
        return LinearLaunch(16, 32, 0, 4, 1)
    return EXPERT_TILES[0] if rows <= EXPERT_TILES[0].rows else EXPERT_TILES[-1]


def packed_tiles(first: ExpertLaunch, element_bytes: int) -> list[ExpertLaunch]:
    """Tiles that may be the fastest for products of experts; `first` is used without measuring."""
    if element_bytes == 4:
        return [first]
    return list(dict.fromkeys([first, *(ExpertLaunch(tile, tile) for tile in EXPERT_TILES)]))


def packed_candidates(rows: int, outputs: int, steps: int) -> list[SmallBatchLaunch]:
    """Launches that may be the fastest for elements of 2 bytes; the first is used without
    measuring."""
    first = packed_linear_launch(2, rows, outputs, steps)
    tiles = (
        (FEW_ROWS_LAUNCH, *FEW_ROWS_CANDIDATES)
        if rows <= ROWS_BOUND
        else (MANY_ROWS_LAUNCH, *MANY_ROWS_CANDIDATES)
    )
    return list(
        dict.fromkeys([first, *(one for tile in tiles for one in _splits_of(tile, outputs, steps))])
    )


def _splits_of(tile: SmallBatchLaunch, outputs: int, steps: int) -> Iterator[SmallBatchLaunch]:
    programs = -(-outputs // tile.columns)
    for splits in SPLITS:
        few = splits > 1 and programs * splits > MAX_PROGRAMS
        if 2 * splits <= steps and not few and programs * splits >= MIN_PROGRAMS // 2:
            yield replace(tile, splits=splits)
