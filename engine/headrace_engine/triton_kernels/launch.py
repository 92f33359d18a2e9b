"""Launch parameters of the kernels, by device generation, head size and width of the elements.

One table and no tuning at run time. The figures keep each kernel within the shared memory of its
generation; they are estimates until they are measured on a device.
"""

from dataclasses import dataclass

# Sequences are cut for decoding where their keys are more than this many; never into more parts
# than MAX_SPLITS, for which the parts grow. A part's size depends on its own sequence alone.
SPLIT_KEYS = 256
MAX_SPLITS = 32

HOPPER = 9


@dataclass(frozen=True, slots=True)
class Launch:
    """Rows and keys of a tile, warps of a program, stages of its loads' pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


# (Hopper or newer, elements of 4 bytes, head size rounded up to a power of two).
PREFILL: dict[tuple[bool, bool, int], Launch] = {
    (True, False, 64): Launch(128, 64, 4, 3),
    (True, False, 128): Launch(128, 64, 8, 3),
    (True, False, 256): Launch(128, 32, 8, 2),
    (True, True, 64): Launch(64, 32, 4, 2),
    (True, True, 128): Launch(64, 32, 4, 2),
    (True, True, 256): Launch(32, 16, 4, 2),
    (False, False, 64): Launch(128, 64, 4, 2),
    (False, False, 128): Launch(64, 64, 4, 2),
    (False, False, 256): Launch(64, 32, 4, 1),
    (False, True, 64): Launch(64, 32, 4, 1),
    (False, True, 128): Launch(32, 32, 4, 1),
    (False, True, 256): Launch(16, 16, 4, 1),
}

# `rows` is the least number of query heads in a tile: tensor cores take 16.
DECODE: dict[tuple[bool, bool, int], Launch] = {
    (True, False, 64): Launch(16, 128, 4, 3),
    (True, False, 128): Launch(16, 64, 4, 3),
    (True, False, 256): Launch(16, 32, 4, 3),
    (True, True, 64): Launch(16, 64, 4, 2),
    (True, True, 128): Launch(16, 32, 4, 2),
    (True, True, 256): Launch(16, 16, 4, 2),
    (False, False, 64): Launch(16, 64, 4, 3),
    (False, False, 128): Launch(16, 64, 4, 2),
    (False, False, 256): Launch(16, 32, 4, 2),
    (False, True, 64): Launch(16, 32, 4, 2),
    (False, True, 128): Launch(16, 32, 4, 1),
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


def linear_launch(element_bytes: int) -> LinearLaunch:
    """For elements of 2 or 4 bytes."""
    return LINEAR[element_bytes == 4]


def row_warps(width: int) -> int:
    """Warps of a program that goes over one row of `width` elements."""
    return min(16, max(1, power_of_two(width) // 512))


def _key(major: int, element_bytes: int, head_dim: int) -> tuple[bool, bool, int]:
    return major >= HOPPER, element_bytes == 4, max(64, power_of_two(head_dim))
