"""The adapters' products by Triton: rows sorted by adapter and split into tiles.

The kernels read the rows on the device and nothing here waits for it, so a step with adapters can
be recorded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..kernels.triton.dependent_launch import DependentLaunches
from ..kernels.triton.launch import (
    LORA_LEAST_ROWS,
    LORA_NARROW,
    LORA_RANKS,
    LoRALaunch,
    LoRALaunches,
    dot_precision,
    lora_chunk,
    lora_launch,
    tile_extent,
)
from ..kernels.triton.lora import lora_expand_kernel, lora_shrink_kernel
from .batch import LoRABatch, LoRALimits, Move, RowSlots
from .experts import LoRAExperts
from .linear import LoRALinear
from .shapes import LinearName

# The numbers of a tile: its slot (below 0: none), its first place in the order, its rows, and one
# for alignment.
TILE = 4
# The largest number of modules in a layer for the kernel of B's product.
MOST_PARTS = 3


@dataclass(frozen=True, slots=True)
class TiledRows:
    """The first `tiles` tiles of a step of `rows` rows. `numbers` int32 [TILE * room + 2 R] are the
    tiles, then the rows sorted by adapter, then the slot of each row's adapter or -1."""

    numbers: torch.Tensor
    tiles: int
    room: int
    rows: int
    launch: LoRALaunch
    dependent_launches: DependentLaunches

    def add(self, linear: LoRALinear, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.tiles:
            self._expand(linear, self._shrink(linear, x), y)

    def _shrink(self, linear: LoRALinear, x: torch.Tensor) -> torch.Tensor:
        """x A in parts that are still to be summed: float32 [chunks, rows, ranks]."""
        launch, inputs, ranks = self.launch, linear.shape.inputs, linear.down.shape[1]
        assert x.stride(-1) == 1, "a row's inputs lie next to each other"
        columns = min(launch.columns, tile_extent(ranks))
        depth = min(launch.depth, tile_extent(inputs))
        chunk = lora_chunk(launch, inputs, depth)
        chunks = -(-inputs // chunk)
        partial = torch.empty(chunks, self.rows, ranks, dtype=torch.float32, device=x.device)
        lora_shrink_kernel[(self.tiles, -(-ranks // columns), chunks)](
            partial, x, linear.down, linear.ends, self.numbers, self._order,
            self.rows, x.stride(0),
            INPUTS=inputs, RANKS=ranks, PARTS=linear.ends.shape[1],
            CHUNK=chunk, ROWS=launch.rows, COLUMNS=columns, DEPTH=depth,
            EXACT=dot_precision(x.element_size()), **self.dependent_launches.small,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
        return partial

    def _expand(self, linear: LoRALinear, partial: torch.Tensor, y: torch.Tensor) -> None:
        launch, outputs = self.launch, linear.shape.outputs
        parts = list(linear.shape.parts.values())
        second, third = ([part.start for part in parts[1:]] + [outputs, outputs])[:2]
        assert len(parts) <= MOST_PARTS and y.stride(-1) == 1
        blocks = sum(-(-part.width // launch.outputs) for part in parts)
        lora_expand_kernel[(self.tiles, blocks)](
            y, partial, linear.up, linear.ends, self.numbers, self._order,
            self.rows, y.stride(0),
            OUTPUTS=outputs, SECOND=second, THIRD=third,
            RANKS=partial.shape[2], MAX_RANK=linear.max_rank, PARTS=len(parts),
            CHUNKS=len(partial), ROWS=launch.rows, COLUMNS=launch.outputs,
            DEPTH=LORA_RANKS, EXACT=dot_precision(y.element_size()),
            num_warps=launch.warps, num_stages=1, **self.dependent_launches.small,
        )  # fmt: skip

    @property
    def owners(self) -> torch.Tensor:
        """int32 [R]: the slot of each row's adapter, below 0 if it has none."""
        begin = TILE * self.room
        return self.numbers[begin + (len(self.numbers) - begin) // 2 :]

    @property
    def _order(self) -> torch.Tensor:
        return self.numbers[TILE * self.room :]


class TiledProducts:
    """Products of adapters by Triton kernels. `deterministic` uses one launch for any number of
    rows; `dependent_launches` says when kernels begin; `measured` holds the fastest launches."""

    def __init__(
        self,
        limits: LoRALimits,
        move: Move,
        deterministic: bool = False,
        dependent_launches: DependentLaunches | None = None,
        measured: LoRALaunches | None = None,
    ) -> None:
        self._limits, self._move, self._deterministic = limits, move, deterministic
        self.dependent_launches = dependent_launches or DependentLaunches()
        self._measured = LoRALaunches() if measured is None or deterministic else measured

    @property
    def sizes(self) -> tuple[int, ...]:
        measured = (most for most, _ in self._measured.few)
        return tuple(dict.fromkeys((1, *measured, LORA_NARROW + 1)))

    def rows(self, slots: RowSlots) -> TiledRows:
        count, launch = len(slots), self.launch(len(slots))
        places = np.argsort(slots, kind="stable")[np.count_nonzero(slots < 0) :]
        tiles = _tiles(slots[places], launch.rows)
        short = count <= self._limits.steps
        room = self.most_tiles(self._limits.steps) if short else len(tiles)
        most = max(count, self._limits.steps)
        numbers = np.full(TILE * room + 2 * most, -1, dtype=np.int32)
        numbers[: TILE * len(tiles)] = tiles.reshape(-1)
        numbers[TILE * room : TILE * room + len(places)] = places
        numbers[TILE * room + most : TILE * room + most + count] = slots
        (moved,) = self._move((numbers,))
        return TiledRows(moved, len(tiles), room, count, launch, self.dependent_launches)

    def static(
        self,
        layers: Sequence[Mapping[LinearName, LoRALinear]],
        device: torch.device,
        experts: Sequence[Mapping[LinearName, LoRAExperts]] = (),
    ) -> "StaticTiles":
        """Buffers for the rows of steps that may be recorded."""
        room = self.most_tiles(self._limits.steps)
        length = TILE * room + 2 * self._limits.steps
        numbers = torch.full((length,), -1, dtype=torch.int32, device=device)
        return StaticTiles(self, layers, numbers, room, experts)

    def most_tiles(self, rows: int) -> int:
        """The largest number of tiles that `rows` rows need, whichever adapters they have."""
        height = LORA_LEAST_ROWS
        return min(rows, (rows + self._limits.slots * (height - 1)) // height)

    def launch(self, rows: int) -> LoRALaunch:
        found = self._measured.of(rows)
        return found or lora_launch(self._limits.element_bytes, rows, self._deterministic)


@dataclass(frozen=True, slots=True)
class StaticTiles:
    """The `numbers` of TiledRows at a fixed address."""

    products: TiledProducts
    layers: Sequence[Mapping[LinearName, LoRALinear]]
    numbers: torch.Tensor
    room: int
    experts: Sequence[Mapping[LinearName, LoRAExperts]] = ()

    def fill(self, batch: LoRABatch, size: int) -> None:
        rows = batch.tokens
        assert isinstance(rows, TiledRows) and rows.room == self.room, "of these products"
        assert rows.launch == self.products.launch(size), "cut as the recording expects"
        self.numbers.copy_(rows.numbers)

    def view(self, size: int) -> LoRABatch:
        tiles = self.products.most_tiles(size)
        launch, dependent_launches = self.products.launch(size), self.products.dependent_launches
        rows = TiledRows(self.numbers, tiles, self.room, size, launch, dependent_launches)
        return LoRABatch(self.layers, rows, rows, experts=self.experts)


def _tiles(owners: RowSlots, height: int) -> npt.NDArray[np.int64]:
    """The tiles [N, TILE] of rows whose adapters `owners` names, in ascending order."""
    slots, firsts, counts = np.unique(owners, return_index=True, return_counts=True)
    found = [
        (slot, first + start, min(height, count - start), 0)
        for slot, first, count in zip(slots, firsts, counts, strict=True)
        for start in range(0, count, height)
    ]
    return np.array(found, dtype=np.int64).reshape(-1, TILE)
