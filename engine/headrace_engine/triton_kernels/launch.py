"""Launch parameters of the kernels, by device generation, head size and width of the elements.

One table and no tuning at run time. The figures keep each kernel within the shared memory of its
generation and no kernel spills registers (benchmarks/triton_aot.py compiles and checks them without
a device; docs/decisions/0016): they are estimates until they are measured on one.
"""

from dataclasses import dataclass

# Sequences are cut for decoding where their keys are more than SPLIT_KEYS; never into more parts
# than MAX_SPLITS, for which the parts grow. Up to so many sequences are cut finer, as they alone do
# not make a program for each multiprocessor. These are sizes of recorded batches: padding up to one
# changes no cut.
SPLIT_KEYS = 256
FINER_SPLITS = ((4, 64), (16, 128))
MAX_SPLITS = 32

# The compute capability of the oldest devices that the kernels are for.
AMPERE = (8, 0)
HOPPER = 9


@dataclass(frozen=True, slots=True)
class Launch:
    """Rows and keys of a tile, warps of a program, stages of its loads' pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


# Blocks are found through a table, so Triton halves the stages: 5 make a ring of two tiles, 3 make
# no ring at all. (Hopper or newer, elements of 4 bytes, head size rounded up to a power of two).
PREFILL: dict[tuple[bool, bool, int], Launch] = {
    (True, False, 64): Launch(128, 64, 4, 5),
    (True, False, 128): Launch(128, 64, 8, 5),
    (True, False, 256): Launch(128, 32, 8, 5),
    (True, True, 64): Launch(64, 32, 8, 1),
    (True, True, 128): Launch(32, 32, 8, 1),
    (True, True, 256): Launch(32, 16, 8, 1),
    (False, False, 64): Launch(128, 64, 8, 5),
    (False, False, 128): Launch(128, 32, 8, 5),
    (False, False, 256): Launch(64, 16, 8, 5),
    (False, True, 64): Launch(64, 32, 8, 1),
    (False, True, 128): Launch(32, 16, 8, 1),
    (False, True, 256): Launch(16, 16, 4, 1),
}

# `rows` is the least number of query heads in a tile: tensor cores take 16.
DECODE: dict[tuple[bool, bool, int], Launch] = {
    (True, False, 64): Launch(16, 128, 4, 5),
    (True, False, 128): Launch(16, 64, 4, 5),
    (True, False, 256): Launch(16, 32, 4, 5),
    (True, True, 64): Launch(16, 64, 4, 5),
    (True, True, 128): Launch(16, 16, 4, 5),
    (True, True, 256): Launch(16, 16, 4, 5),
    (False, False, 64): Launch(16, 64, 4, 5),
    (False, False, 128): Launch(16, 32, 4, 5),
    (False, False, 256): Launch(16, 16, 4, 5),
    (False, True, 64): Launch(16, 32, 4, 5),
    (False, True, 128): Launch(16, 16, 4, 5),
    (False, True, 256): Launch(16, 16, 4, 1),
}

LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """Rows and outputs of a tile of a product, and how many inputs it takes in a step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# By whether elements have 4 bytes. One for all numbers of rows: its order of sums must not change.
LINEAR = {False: LinearLaunch(64, 64, 64, 4, 4), True: LinearLaunch(32, 32, 32, 4, 2)}


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`, itself at least 1."""
    return 1 << (number - 1).bit_length()


def prefill_launch(major: int, element_bytes: int, head_dim: int) -> Launch:
    """For a device of compute capability `major`; head_dim up to LARGEST_HEAD."""
    return PREFILL[_key(major, element_bytes, head_dim)]


def decode_launch(major: int, element_bytes: int, head_dim: int) -> Launch:
    """For a device of compute capability `major`; head_dim up to LARGEST_HEAD."""
    return DECODE[_key(major, element_bytes, head_dim)]


def split_keys(sequences: int, tile: int) -> int:
    """Keys of a part, where `sequences` decode together in tiles of so many keys."""
    finer = [keys for most, keys in FINER_SPLITS if sequences <= most]
    return max(tile, finer[0] if finer else SPLIT_KEYS)


def linear_launch(element_bytes: int) -> LinearLaunch:
    """For elements of 2 or 4 bytes."""
    return LINEAR[element_bytes == 4]


def row_warps(width: int) -> int:
    """Warps of a program that goes over one row of `width` elements."""
    return min(16, max(1, power_of_two(width) // 512))


def _key(major: int, element_bytes: int, head_dim: int) -> tuple[bool, bool, int]:
    return major >= HOPPER, element_bytes == 4, max(64, power_of_two(head_dim))
