"""Launch parameters of the kernels, by device generation, head size and width of the elements.

The tables keep each kernel within the shared memory of its generation, and its loops in registers
(benchmarks/triton_aot.py compiles and checks them without a device; docs/decisions/0016). They are
estimates: at warm-up, an engine on a GPU measures them against the candidates here
(docs/decisions/0021). Nothing is tuned while it serves.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

# Sequences are split for decoding if they have more keys than SPLIT_KEYS; never into more than
# MAX_SPLITS parts, so parts of long sequences are larger. Batches up to these sizes are split
# finer, because they do not make a program for each multiprocessor. These are sizes of recorded
# batches: padding up to one does not change the split. More parts than the device needs cost it
# a third of its bandwidth (docs/decisions/0045).
SPLIT_KEYS = 2048
FINER_SPLITS = ((4, 64), (16, 256), (64, 512))
MAX_SPLITS = 32
# Up to this many sequences, the programs that merge parts are too few to hide each other's waits.
FEW_MERGES = 16

# The compute capability of the oldest supported devices.
AMPERE = (8, 0)
HOPPER = 9


@dataclass(frozen=True, slots=True)
class Launch:
    """The rows and keys of a tile, the warps of a program, and the stages of its load pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


# Blocks are found through a table, so Triton halves the stages: 5 stages make a ring of two tiles,
# 3 make no ring. (Hopper or newer, elements of 4 bytes, head size rounded up to a power of two).
PREFILL: dict[tuple[bool, bool, int], Launch] = {
    (True, False, 64): Launch(128, 64, 4, 5),
    (True, False, 128): Launch(128, 64, 8, 5),
    (True, False, 256): Launch(128, 32, 8, 5),
    (True, True, 64): Launch(32, 32, 4, 1),
    (True, True, 128): Launch(32, 32, 8, 1),
    (True, True, 256): Launch(16, 16, 4, 1),
    (False, False, 64): Launch(128, 64, 8, 5),
    (False, False, 128): Launch(128, 32, 8, 5),
    (False, False, 256): Launch(64, 16, 8, 5),
    (False, True, 64): Launch(64, 32, 8, 1),
    (False, True, 128): Launch(32, 16, 8, 1),
    (False, True, 256): Launch(16, 16, 4, 1),
}

# `rows` is the least number of query heads in a tile: tensor cores need 16.
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
# Latents have more elements. The number of heads in a tile, by (Hopper or newer, elements of 4
# bytes). Larger tiles would spill on devices with less shared memory.
LATENT = {
    (False, False): Launch(32, 16, 8, 1),
    (False, True): Launch(16, 16, 8, 1),
    (True, False): Launch(64, 32, 8, 2),
    (True, True): Launch(16, 16, 8, 1),
}
# Few tokens give few programs: their keys are split into at most this many parts, divided by
# tokens.
LATENT_SPLITS = 64


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """The rows and outputs of a product's tile, and the inputs of one step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# By whether elements have 4 bytes. There is one launch for all numbers of rows, since the order of
# its sums must not change.
LINEAR = {False: LinearLaunch(64, 64, 64, 4, 4), True: LinearLaunch(32, 32, 32, 4, 2)}

# Grouped products of experts. (Hopper or newer, elements of 4 bytes, rows of a tile): the rows are
# the average of an expert, up to the largest entry. Gate and up share the columns.
EXPERTS: dict[tuple[bool, bool, int], LinearLaunch] = {
    (True, False, 16): LinearLaunch(16, 64, 128, 4, 4),
    (True, False, 64): LinearLaunch(64, 128, 64, 4, 4),
    (True, False, 128): LinearLaunch(128, 128, 64, 8, 4),
    (False, False, 16): LinearLaunch(16, 64, 128, 4, 4),
    (False, False, 64): LinearLaunch(64, 128, 64, 4, 3),
    (False, False, 128): LinearLaunch(128, 128, 64, 8, 3),
    (True, True, 16): LinearLaunch(16, 64, 64, 4, 3),
    (True, True, 64): LinearLaunch(32, 64, 32, 4, 2),
    (True, True, 128): LinearLaunch(32, 64, 32, 4, 2),
    (False, True, 16): LinearLaunch(16, 64, 64, 4, 3),
    (False, True, 64): LinearLaunch(32, 64, 32, 4, 2),
    (False, True, 128): LinearLaunch(32, 64, 32, 4, 2),
}
EXPERT_ROWS = (16, 64, 128)
# Successive tiles of rows that use the same weights.
EXPERT_TILES = 8
# For experts' adapters: the columns of A that a program computes, and the elements of a row that
# one copies.
EXPERT_LORA_RANKS, EXPERT_LORA_BLOCK = 32, 128


@dataclass(frozen=True, slots=True)
class ExpertLaunch:
    """Launches of gate and up, and of down. Their tiles have the same number of rows."""

    up: LinearLaunch
    down: LinearLaunch


# Launches are measured for up to each of these numbers of tokens, and for more than the last one.
EXPERT_BOUNDS = (1, 16, 64, 256)
# The number of sums that a thread can hold besides its operands: on Hopper and newer, and on older
# devices.
SUMS = {True: 128, False: 64}
# Candidates in addition to the table's, by the rows of a tile. They are faster if few rows read
# many weights, and if many rows share a tile of weights.
EXPERT_CANDIDATES: dict[int, tuple[LinearLaunch, ...]] = {
    16: (
        LinearLaunch(16, 128, 64, 4, 4),
        LinearLaunch(16, 32, 256, 4, 3),
        LinearLaunch(16, 64, 64, 4, 6),
        LinearLaunch(16, 128, 128, 4, 3),
    ),
    64: (
        LinearLaunch(64, 256, 64, 8, 3),
        LinearLaunch(64, 128, 128, 4, 3),
        LinearLaunch(128, 128, 64, 8, 4),
        LinearLaunch(16, 64, 128, 4, 4),
    ),
    128: (
        LinearLaunch(128, 256, 64, 8, 3),
        LinearLaunch(64, 256, 64, 8, 3),
        LinearLaunch(128, 128, 64, 4, 4),
        LinearLaunch(64, 128, 64, 4, 4),
    ),
}


@dataclass(frozen=True, slots=True)
class LoRALaunch:
    """Rows of a tile, columns of A and outputs of B of one program, the inputs of one step, the
    least inputs of a chunk, the largest number of chunks; warps, stages of A's pipeline."""

    rows: int
    columns: int
    outputs: int
    depth: int
    chunk: int
    chunks: int
    warps: int
    stages: int


# (elements of 4 bytes, more than LORA_NARROW rows). Chunks of inputs are summed in one order, and
# are smaller if few rows make few programs. The bound is a size of recorded batches.
LORA_NARROW = 256
LORA = {
    (False, False): LoRALaunch(16, 16, 128, 128, 512, 16, 4, 4),
    (False, True): LoRALaunch(64, 64, 128, 64, 2048, 4, 4, 4),
    (True, False): LoRALaunch(16, 16, 64, 64, 512, 16, 4, 3),
    (True, True): LoRALaunch(32, 32, 64, 32, 2048, 4, 4, 3),
}
# The number of ranks that a program multiplies in a step: the minimum for tensor cores. More would
# spill registers.
LORA_RANKS = 16
LORA_LEAST_ROWS = 16
# Launches of up to LORA_NARROW rows are measured for up to each of these: sizes of recorded
# batches.
LORA_BOUNDS = (1, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class LoRALaunches:
    """Launches measured on a device, by the largest number of rows of each. The table has those for
    None and for more rows."""

    few: tuple[tuple[int, LoRALaunch], ...] = ()

    def of(self, rows: int) -> LoRALaunch | None:
        return next((one for most, one in self.few if rows <= most), None)


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """`part` is the least number of keys of a part; with `merges` the kernel itself merges the
    parts."""

    tile: Launch
    part: int
    merges: bool = False


@dataclass(frozen=True, slots=True)
class AttentionLaunches:
    """Launches measured on a device for a model: `decodes` by the largest number of sequences of
    each. The table has those for None and for more sequences."""

    prefill: Launch | None = None
    decodes: tuple[tuple[int, DecodeLaunch], ...] = ()

    def decode(self, sequences: int) -> DecodeLaunch | None:
        return next((one for most, one in self.decodes if sequences <= most), None)


# Bounds that are measured separately; they are also sizes of recorded batches.
DECODE_BOUNDS = (1, 4, 16, 64, 256)
DECODE_TILES = ((64, 8, 5), (128, 4, 5), (32, 4, 5))
PREFILL_TILES = (
    Launch(128, 128, 8, 5),
    Launch(128, 128, 8, 3),
    Launch(64, 64, 4, 5),
    Launch(128, 32, 8, 5),
)


@dataclass(frozen=True, slots=True)
class SmallBatchLaunch:
    """Outputs of a tile, inputs of one step, and the number of parts that the inputs are split
    into."""

    columns: int
    depth: int
    splits: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class VectorLaunch:
    """Outputs of a program that multiplies one row without tensor cores, and the inputs that it
    reads at once."""

    columns: int
    depth: int
    warps: int


# cuBLAS computes products of more rows. Launches are chosen for up to each of these numbers.
ROW_BOUNDS = (1, 8, 16, 32, 64)
SMALL_BATCH_TILES = (
    SmallBatchLaunch(64, 128, 1, 4, 4),
    SmallBatchLaunch(64, 64, 1, 4, 6),
    SmallBatchLaunch(32, 256, 1, 4, 4),
    SmallBatchLaunch(128, 64, 1, 4, 4),
)
# Launches for weights of one byte.
FLOAT8_TILES = (
    SmallBatchLaunch(64, 128, 1, 4, 4),
    SmallBatchLaunch(32, 256, 1, 4, 4),
    SmallBatchLaunch(128, 128, 1, 8, 4),
    SmallBatchLaunch(64, 64, 1, 4, 6),
)
# Launches for two matrices at a time.
SILU_TILES = (SmallBatchLaunch(32, 128, 1, 4, 4), SmallBatchLaunch(64, 64, 1, 4, 5))
# Launches for one row, for weights of two bytes and of one.
VECTOR_TILES = {
    2: (
        VectorLaunch(8, 1024, 4),
        VectorLaunch(4, 2048, 4),
        VectorLaunch(8, 2048, 8),
    ),
    1: (
        VectorLaunch(8, 1024, 4),
        VectorLaunch(4, 2048, 4),
        VectorLaunch(4, 1024, 2),
    ),
}
SPLITS = (1, 2, 4, 8)
# With fewer programs, multiprocessors are idle; with more, inputs are not split further.
FEWEST_PROGRAMS, MOST_PROGRAMS = 96, 1024


def small_batch_candidates(inputs: int, outputs: int) -> list[SmallBatchLaunch]:
    """Launches that may be the fastest for a weight [outputs, inputs]; none if no kernel supports
    it."""
    return [one for tile in SMALL_BATCH_TILES for one in _cut(tile, inputs, outputs)]


def vector_candidates(inputs: int, element_bytes: int) -> list[VectorLaunch]:
    """Launches that may be the fastest for one row, for weights of 1 or 2 bytes an element."""
    return [tile for tile in VECTOR_TILES[element_bytes] if inputs % tile.depth == 0]


def float8_candidates(inputs: int, outputs: int, group: int) -> list[SmallBatchLaunch]:
    """Like small_batch_candidates, for 8-bit floats with a scale for each `group` inputs; `group` 0
    means one scale. The first is the default, used without measuring."""
    fitting = (tile for tile in FLOAT8_TILES if group % tile.depth == 0)
    return [one for tile in fitting for one in _cut(tile, inputs, outputs)]


def _cut(tile: SmallBatchLaunch, inputs: int, outputs: int) -> Iterator[SmallBatchLaunch]:
    """The launch with each number of parts that gives enough programs, but not too many."""
    programs = -(-outputs // tile.columns)
    for splits in SPLITS:
        enough = FEWEST_PROGRAMS <= programs * splits
        cut = splits == 1 or programs * splits <= MOST_PROGRAMS
        if enough and cut and inputs % (tile.depth * splits) == 0:
            yield replace(tile, splits=splits)


def silu_candidates(inputs: int, outputs: int) -> list[SmallBatchLaunch]:
    """Like small_batch_candidates, for gate and up [2 * outputs, inputs] with the activation."""
    return [
        tile
        for tile in SILU_TILES
        if inputs % tile.depth == 0 and outputs >= FEWEST_PROGRAMS * tile.columns
    ]


def expert_candidates(first: ExpertLaunch, major: int, element_bytes: int) -> list[ExpertLaunch]:
    """Candidates for experts.

    `first` is the table's launch; the others have other tiles for both products. float32 has no
    others.
    """
    tiles = EXPERT_CANDIDATES[first.up.rows] if element_bytes == 2 else ()
    most = 32 * SUMS[major >= HOPPER]
    fitting = (one for one in tiles if one.rows * one.columns <= most * one.warps)
    return list(dict.fromkeys((first, *(ExpertLaunch(tile, tile) for tile in fitting))))


def down_candidates(first: ExpertLaunch, both: list[ExpertLaunch]) -> list[ExpertLaunch]:
    """Candidates for the product with down.

    `first` is the best launch so far; the others have other tiles with equally many rows.
    """
    found = [replace(first, down=one.down) for one in both if one.down.rows == first.up.rows]
    return list(dict.fromkeys((first, *found)))


def lora_candidates(first: LoRALaunch) -> list[LoRALaunch]:
    """Candidates for adapters.

    `first` is the table's launch for few rows; the others have fewer and larger chunks, or other
    columns of B.
    """
    return [
        first,
        replace(first, chunk=2 * first.chunk, chunks=8),
        replace(first, chunk=4 * first.chunk, chunks=4),
        replace(first, outputs=first.outputs // 2),
        replace(first, outputs=2 * first.outputs),
    ]


def prefill_candidates(first: Launch) -> list[Launch]:
    """Candidates for prompts; `first` is the table's launch."""
    return [first, *(one for one in PREFILL_TILES if one != first)]


def part_candidates(first: DecodeLaunch) -> list[DecodeLaunch]:
    """Candidates for decodes; `first` is the table's launch. The others have other parts."""
    keys = first.tile.keys
    parts = [first.part * factor for factor in (1, 2, 4)] + [max(keys, first.part // 2)]
    return [replace(first, part=part) for part in dict.fromkeys(parts)]


def merge_candidates(first: DecodeLaunch) -> list[DecodeLaunch]:
    """Candidates for decodes; `first` is the best launch so far. The other merges its parts within
    the kernel, which must pay: with few parts both are equally fast, with one more they are not."""
    return [first, replace(first, merges=True)]


def tile_candidates(first: DecodeLaunch) -> list[DecodeLaunch]:
    """Candidates for decodes; `first` is the best launch so far.

    The others have other tiles for the same parts.
    """
    tiles = [Launch(first.tile.rows, *tile) for tile in DECODE_TILES]
    return [first] + [
        replace(first, tile=tile, part=max(first.part, tile.keys))
        for tile in tiles
        if tile != first.tile
    ]


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


def tile_extent(extent: int) -> int:
    """The size of a tile with room for `extent`: tensor cores need at least 16."""
    return max(16, power_of_two(extent))


def dot_precision(element_bytes: int) -> str:
    """The precision of a kernel's products: tf32 would be less precise than float32."""
    return "ieee" if element_bytes == 4 else "tf32"


def prefill_launch(major: int, element_bytes: int, head_dim: int) -> Launch:
    """The launch for prompts on a device of compute capability `major`, for heads of up to
    LARGEST_HEAD."""
    return PREFILL[_key(major, element_bytes, head_dim)]


def decode_launch(major: int, element_bytes: int, head_dim: int) -> Launch:
    """The launch for decodes on a device of compute capability `major`, for heads of up to
    LARGEST_HEAD."""
    return DECODE[_key(major, element_bytes, head_dim)]


def split_keys(sequences: int, tile: int) -> int:
    """The keys of a part if `sequences` decode at once, in tiles of `tile` keys."""
    finer = [keys for most, keys in FINER_SPLITS if sequences <= most]
    return max(tile, finer[0] if finer else SPLIT_KEYS)


def latent_launch(major: int, element_bytes: int, heads: int) -> Launch:
    """The launch for attention of `heads` heads to latents."""
    table = LATENT[major >= HOPPER, element_bytes == 4]
    return replace(table, rows=min(table.rows, tile_extent(heads)))


def latent_splits(tokens: int, max_seq_len: int, least_part: int) -> int:
    """The most parts of a token's keys, a power of two."""
    wanted = min(max(1, LATENT_SPLITS // tokens), -(-max_seq_len // least_part))
    return power_of_two(wanted)


def merge_warps(sequences: int, head_dim: int) -> int:
    """Warps of a program that merges the parts of a head. If there are few programs, each has many
    warps, so that a thread loads its few numbers at once; many programs hide each other's
    latencies."""
    if sequences > FEW_MERGES:
        return 4
    return min(16, MAX_SPLITS * tile_extent(head_dim) // 256)


def linear_launch(element_bytes: int) -> LinearLaunch:
    """The launch for elements of 2 or 4 bytes."""
    return LINEAR[element_bytes == 4]


def expert_launch(major: int, element_bytes: int, average: float | None) -> LinearLaunch:
    """The launch for experts with `average` rows each; None: one launch for every number of
    rows."""
    fitting = [rows for rows in EXPERT_ROWS if average is not None and average <= rows]
    rows = EXPERT_ROWS[1] if average is None else (*fitting, EXPERT_ROWS[-1])[0]
    return EXPERTS[major >= HOPPER, element_bytes == 4, rows]


def lora_launch(element_bytes: int, rows: int, deterministic: bool = False) -> LoRALaunch:
    """The launch for `rows` rows of elements of 2 or 4 bytes; if deterministic, the same for
    all."""
    return LORA[element_bytes == 4, deterministic or rows > LORA_NARROW]


def lora_chunk(launch: LoRALaunch, inputs: int, depth: int) -> int:
    """The number of inputs that one program takes, in steps of `depth`."""
    wanted = max(min(launch.chunk, inputs), -(-inputs // launch.chunks))
    return -(-wanted // depth) * depth


def expert_lora_columns(rows: int, outputs: int) -> int:
    """Outputs of one program in a product with B of experts' adapters, for tiles of `rows`. There
    are few programs, because most of them end immediately."""
    return min(256 if rows <= EXPERT_ROWS[0] else 64, tile_extent(outputs))


def expert_lora_depth(element_bytes: int, rows: int) -> int:
    """Inputs of one step in a product with A of experts' adapters, for tiles of `rows`."""
    return (256 if rows <= EXPERT_ROWS[0] else 128) // element_bytes


def row_warps(width: int) -> int:
    """The number of warps of a program that computes one row of `width` elements."""
    return min(16, max(1, power_of_two(width) // 512))


def _key(major: int, element_bytes: int, head_dim: int) -> tuple[bool, bool, int]:
    return major >= HOPPER, element_bytes == 4, max(64, power_of_two(head_dim))


@dataclass(frozen=True, slots=True)
class RecurrentLaunch:
    """The tokens of a chunk, the columns of a state that one program advances through chunks, the
    warps of a program, and the stages of its load pipeline."""

    tokens: int
    columns: int
    warps: int
    stages: int


# Runs of fewer tokens are advanced token by token; so are all runs with elements of 4 bytes, for
# which there are no tensor cores.
LEAST_CHUNKED, TOKEN_BY_TOKEN = 16, 1 << 30


@dataclass(frozen=True, slots=True)
class RecurrentLaunches:
    """Launches of gated delta nets and of Mamba-2, whose states have more columns. `least` is the
    number of tokens from which runs are advanced in chunks, by whether elements have 4 bytes."""

    delta: RecurrentLaunch = RecurrentLaunch(64, 32, 4, 2)
    space: RecurrentLaunch = RecurrentLaunch(32, 32, 8, 1)
    least: tuple[int, int] = (LEAST_CHUNKED, TOKEN_BY_TOKEN)


RECURRENT = RecurrentLaunches()
