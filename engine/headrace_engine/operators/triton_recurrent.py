"""Recurrent parts of layers by Triton kernels, which read and write states in their blocks. The
host never waits for the device. Plain torch computes what the kernels do not support.

If all runs of a step are short, the kernels' grids depend only on the number of sequences, so
CUDA graphs can record the step. A recorded batch has fixed addresses; a row of `targets` whose
first block is negative is not written.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..core.attention_backend import LayerCache
from ..core.recurrent_state import StateBatch
from ..device.transfer import Transfer
from ..kernels.triton.convolution import convolve_kernel, window_kernel
from ..kernels.triton.dependent_launch import DependentLaunches
from ..kernels.triton.gated_delta import (
    delta_chunk_kernel,
    delta_gate_kernel,
    delta_states_kernel,
    gated_delta_kernel,
)
from ..kernels.triton.launch import (
    RECURRENT,
    RecurrentLaunches,
    dot_precision,
    power_of_two,
    row_warps,
    tile_extent,
)
from ..kernels.triton.state_space import (
    selective_scan_kernel,
    space_gate_kernel,
    state_space_kernel,
)
from .recurrent import (
    Convolution,
    DeltaWeights,
    Mamba2Weights,
    MambaWeights,
    Selection,
    TorchGatedDelta,
    TorchSelectiveScan,
    TorchShortConvolution,
    TorchStateSpace,
)
from .state_memory import StateMemory

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Limits of the kernels: positions of a convolution, tensors of a layer's cache, and elements of a
# head's row.
LONGEST, PAGES, WIDEST = 16, 2, 256
# Channels of one program, and tokens of a convolution's tile.
CHANNELS, TILE = 128, 16
# Elements of a state for each warp.
WARP_ELEMENTS = 2048


class TritonRecurrences:
    """Makes recurrent parts that Triton kernels compute."""

    def __init__(
        self, dependent_launches: DependentLaunches, launches: RecurrentLaunches = RECURRENT
    ) -> None:
        self._steps = _Steps(dependent_launches, launches)

    def gated_delta(self, weights: DeltaWeights) -> "TritonGatedDelta":
        return TritonGatedDelta(weights, self._steps)

    def state_space(self, weights: Mamba2Weights) -> "TritonStateSpace":
        return TritonStateSpace(weights, self._steps)

    def selective_scan(self, weights: MambaWeights) -> "TritonSelectiveScan":
        return TritonSelectiveScan(weights, self._steps)

    def short_convolution(self, convolution: Convolution) -> "TritonShortConvolution":
        return TritonShortConvolution(convolution, self._steps)


class TritonGatedDelta:
    """A gated delta net without its matrix products, by Triton kernels."""

    def __init__(self, weights: DeltaWeights, steps: "_Steps") -> None:
        self._torch, self._steps = TorchGatedDelta(weights), steps
        self._rates = -weights.a_log.float().exp().contiguous()
        self._taps = _Taps.of(weights.convolution)

    def __call__(
        self,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
        decay: torch.Tensor,
        layer: int,
        memory: StateMemory,
    ) -> torch.Tensor:
        shape = self._torch.weights.shape
        step = self._steps.step(mixed, self._taps, layer, memory)
        if step is None or max(shape.key_dim, shape.value_dim) > WIDEST:
            return self._torch(mixed, gate, beta, decay, layer, memory)
        output = mixed.new_empty(len(mixed), shape.value_width)
        rows = (mixed, gate.flatten(1), _dense(beta), _dense(decay))
        table, by_channel = step.table, self._torch.weights.by_channel
        alone = table.all if by_channel else table.short
        if len(alone):
            self._advance(output, rows, step, alone)
        if len(table.long) and not by_channel:
            self._advance_chunks(output, rows, step)
        return output

    def _advance(
        self,
        output: torch.Tensor,
        rows: tuple[torch.Tensor, ...],
        step: "_Step",
        sequences: torch.Tensor,
    ) -> None:
        """Advances sequences token by token."""
        weights, shape = self._torch.weights, self._torch.weights.shape
        keys, values = power_of_two(shape.key_dim), power_of_two(shape.value_dim)
        gated_delta_kernel[(len(sequences), shape.key_heads)](
            output, *rows, self._taps.weight, self._taps.bias,
            self._rates, weights.dt_bias, weights.norm,
            *step.window.tensors, *step.matrix.tensors, *step.places, *step.table.writes, sequences,
            *[part.stride(0) for part in rows], step.stride, weights.eps,
            KEY_HEADS=shape.key_heads, SHARED=shape.value_heads // shape.key_heads,
            KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim, KEYS=keys, VALUES=values,
            SIZE=self._taps.size, TAPS=power_of_two(self._taps.size - 1),
            WINDOW_ELEMENTS=step.window.sizes[0], WINDOW_MORE=step.window.sizes[1],
            BY_CHANNEL=weights.by_channel,
            **step.constants, **step.options, num_warps=_warps(keys * values),
        )  # fmt: skip

    def _advance_chunks(
        self, output: torch.Tensor, rows: tuple[torch.Tensor, ...], step: "_Step"
    ) -> None:
        weights, shape, table = self._torch.weights, self._torch.weights.shape, step.table
        mixed, gate, beta, decay = rows
        convolved = step.convolve(mixed, self._taps, table.chunks, silu=True)
        step.write_windows(mixed, self._taps, table.long)
        tokens, heads = len(mixed), shape.value_heads
        changes = mixed.new_empty(tokens, heads, shape.value_dim)
        lookups = mixed.new_empty(tokens, heads, shape.key_dim)
        scales = mixed.new_empty(tokens, 2 * shape.key_heads, dtype=torch.float32)
        vectors = (self._rates, weights.dt_bias)
        launch, precision = self._steps.launches.delta, dot_precision(mixed.element_size())
        heads_of = {
            "KEY_HEADS": shape.key_heads,
            "SHARED": heads // shape.key_heads,
            "KEY_DIM": shape.key_dim,
            "VALUE_DIM": shape.value_dim,
            "KEYS": tile_extent(shape.key_dim),
            "TOKENS": launch.tokens,
            "EXACT": precision,
        }
        delta_chunk_kernel[(len(table.chunks[0]), heads)](
            changes, lookups, scales, convolved, beta, decay, *vectors, *table.chunks[1:],
            beta.stride(0), decay.stride(0), VALUES=tile_extent(shape.value_dim),
            **heads_of, **step.options, num_warps=launch.warps, num_stages=1,
        )  # fmt: skip
        columns = min(launch.columns, tile_extent(shape.value_dim))
        delta_states_kernel[(len(table.long), heads, -(-shape.value_dim // columns))](
            changes, lookups, scales, convolved, decay, *vectors,
            *step.matrix.tensors, *step.places, *table.writes, table.long,
            decay.stride(0), step.stride, COLUMNS=columns, **heads_of, **step.constants,
            **step.options, num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
        delta_gate_kernel[(len(table.chunks[0]), heads)](
            output, changes, gate, weights.norm, *table.chunks[1:], gate.stride(0), weights.eps,
            HEADS=heads, VALUE_DIM=shape.value_dim, VALUES=power_of_two(shape.value_dim),
            TOKENS=TILE, **step.options, num_warps=4,
        )  # fmt: skip


class TritonStateSpace:
    """A Mamba-2 layer without its matrix products, by Triton kernels."""

    def __init__(self, weights: Mamba2Weights, steps: "_Steps") -> None:
        self._torch, self._steps = TorchStateSpace(weights), steps
        self._vectors = (-weights.a_log.float().exp().contiguous(), weights.dt_bias, weights.skip)
        self._taps = _Taps.of(weights.convolution)

    def __call__(
        self,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        steps: torch.Tensor,
        layer: int,
        memory: StateMemory,
    ) -> torch.Tensor:
        shape = self._torch.weights.shape
        step = self._steps.step(mixed, self._taps, layer, memory)
        if step is None or max(shape.head_dim, shape.state_size) > WIDEST:
            return self._torch(mixed, gate, steps, layer, memory)
        rows, steps = step.convolve_all(mixed, self._taps, silu=True), _dense(steps)
        found, launch = mixed.new_empty(len(mixed), shape.width), self._steps.launches.space
        if len(step.table.short):
            self._advance(found, rows, steps, step, step.table.short, 1)
        if len(step.table.long):
            self._advance(found, rows, steps, step, step.table.long, launch.tokens)
        return self._gated(found, _dense(gate), step)

    def _advance(
        self,
        found: torch.Tensor,
        rows: torch.Tensor,
        steps: torch.Tensor,
        step: "_Step",
        sequences: torch.Tensor,
        tokens: int,
    ) -> None:
        """Advances sequences by `tokens` tokens at a time."""
        shape, launch = self._torch.weights.shape, self._steps.launches.space
        dim = min(launch.columns, tile_extent(shape.head_dim))
        state_space_kernel[(len(sequences), shape.heads, -(-shape.head_dim // dim))](
            found, rows, steps, *self._vectors, *step.matrix.tensors, *step.places,
            *step.table.writes, sequences, steps.stride(0), step.stride,
            HEADS=shape.heads, HEAD_DIM=shape.head_dim, GROUPS=shape.groups,
            STATE=shape.state_size, DIM=dim, INNER=tile_extent(shape.state_size), TOKENS=tokens,
            EXACT=dot_precision(rows.element_size()), **step.constants,
            **step.options, num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip

    def _gated(self, found: torch.Tensor, gate: torch.Tensor, step: "_Step") -> torch.Tensor:
        weights, output = self._torch.weights, torch.empty_like(found)
        groups, width = weights.shape.groups, weights.shape.width // weights.shape.groups
        space_gate_kernel[(len(found), groups)](
            output, found, gate, weights.norm, gate.stride(0), weights.eps,
            GROUPS=groups, WIDTH=width, BLOCK=power_of_two(width),
            NORM=weights.norm is not None, NORM_FIRST=weights.norm_first,
            **step.options, num_warps=row_warps(width),
        )  # fmt: skip
        return output


class TritonSelectiveScan:
    """A Mamba layer without its first and last matrix product, by Triton kernels."""

    def __init__(self, weights: MambaWeights, steps: "_Steps") -> None:
        self._torch, self._steps = TorchSelectiveScan(weights), steps
        self._rates = -weights.a_log.float().exp().contiguous()
        self._taps = _Taps.of(weights.convolution)

    def __call__(
        self,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        select: Selection,
        layer: int,
        memory: StateMemory,
    ) -> torch.Tensor:
        channels, state_size = self._rates.shape
        step = self._steps.step(mixed, self._taps, layer, memory)
        if step is None or state_size > WIDEST:
            return self._torch(mixed, gate, select, layer, memory)
        values = step.convolve_all(mixed, self._taps, silu=True)
        rows = (values, *map(_dense, (gate, *select(values))))
        output, table = mixed.new_empty(mixed.shape), step.table
        inner = power_of_two(state_size)
        block = min(power_of_two(channels), max(1, WARP_ELEMENTS // inner))
        selective_scan_kernel[(len(table.all), -(-channels // block))](
            output, *rows, self._rates, self._torch.weights.skip,
            *step.matrix.tensors, *step.places, *table.writes,
            *[part.stride(0) for part in rows], step.stride,
            CHANNELS=channels, STATE=state_size, BLOCK=block, INNER=inner,
            **step.constants, **step.options, num_warps=1,
        )  # fmt: skip
        return output


class TritonShortConvolution:
    """A convolution between two gates, by Triton kernels."""

    def __init__(self, convolution: Convolution, steps: "_Steps") -> None:
        self._torch, self._steps = TorchShortConvolution(convolution), steps
        self._taps = _Taps.of(convolution)

    def __call__(
        self,
        x: torch.Tensor,
        before: torch.Tensor,
        after: torch.Tensor,
        layer: int,
        memory: StateMemory,
    ) -> torch.Tensor:
        inputs = before * x
        step = self._steps.step(inputs, self._taps, layer, memory)
        if step is None:
            return self._torch(x, before, after, layer, memory)
        return after * step.convolve_all(inputs, self._taps, silu=False)


@dataclass(frozen=True, slots=True)
class _Taps:
    """The weights of a convolution as the kernels read them: [C, K] and [C]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, convolution: Convolution) -> "_Taps":
        bias = convolution.bias
        return cls(convolution.weight.contiguous(), None if bias is None else bias.contiguous())

    @property
    def size(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True, slots=True)
class _Table:
    """A step's runs on the device, all int32.

    `writes` are four tensors: the first token of each sequence; the number of each sequence's first
    write; the token after which each write happens; each write's row of targets. A sequence's own
    state is written last. `short` are the sequences with few tokens, `long` the others, `all` both.
    `chunks` (sequences, first tokens, ends) are the chunks of `long`. `pieces` are the whole
    sequences of `short`, then `chunks`. `longest` is the number of tokens of the longest sequence.
    """

    batch: StateBatch
    writes: tuple[torch.Tensor, ...]
    short: torch.Tensor
    long: torch.Tensor
    all: torch.Tensor
    chunks: tuple[torch.Tensor, ...]
    pieces: tuple[torch.Tensor, ...]
    longest: int

    @classmethod
    def of(cls, batch: StateBatch, tokens: int, least: int, move: Transfer) -> "_Table":
        """A batch's table. Chunks have up to `tokens` tokens, long sequences `least` or more."""
        count = len(batch.fresh)
        starts, ends = [0] * count, [0] * count
        writes: list[tuple[int, int, int]] = []
        for run in reversed(batch.runs):
            starts[run.sequence] = run.begin
        for run in batch.runs:
            ends[run.sequence] = run.end
            writes += [(run.sequence, run.end, row) for row in sorted(run.writes, reverse=True)]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        long = [length >= least for length in lengths]
        chunks = [
            (run.sequence, begin, min(begin + tokens, run.end))
            for run in batch.runs
            for begin in range(run.begin, run.end, tokens)
            if long[run.sequence]
        ]
        whole = [(one, starts[one], ends[one]) for one in range(count) if not long[one]]
        arrays = [
            starts,
            np.searchsorted([write[0] for write in writes], range(count + 1)),
            *_columns(writes)[1:],
            [one for one in range(count) if not long[one]],
            [one for one in range(count) if long[one]],
            range(count),
            *_columns(chunks),
            *_columns(whole + chunks),
        ]
        moved = move([np.array(array, dtype=np.int32) for array in arrays])
        return cls(
            batch=batch,
            writes=tuple(moved[:4]),
            short=moved[4],
            long=moved[5],
            all=moved[6],
            chunks=tuple(moved[7:10]),
            pieces=tuple(moved[10:]),
            longest=max(lengths),
        )


def _columns(rows: Sequence[tuple[int, int, int]]) -> list[np.ndarray]:
    return list(np.array(rows, dtype=np.int32).reshape(-1, 3).T)


@dataclass(frozen=True, slots=True)
class _Pages:
    """A layer's cache as elements of one dtype: two tensors, and the number of a block's elements
    in each."""

    tensors: tuple[torch.Tensor, torch.Tensor]
    sizes: tuple[int, int]

    @classmethod
    def of(cls, cache: Sequence[torch.Tensor], dtype: torch.dtype) -> "_Pages":
        views = [part.flatten(1).view(torch.uint8).view(dtype) for part in cache]
        sizes = [view.shape[1] for view in views]
        return cls((views[0], views[-1]), (sizes[0], sizes[1] if len(sizes) == 2 else 0))


@dataclass(frozen=True, slots=True)
class _Step:
    """A layer's states in one step."""

    table: _Table
    window: _Pages
    matrix: _Pages
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    stride: int
    first: int
    options: dict[str, int]

    @property
    def constants(self) -> dict[str, int]:
        """The kernels' constants for the place of a state's second tensor."""
        elements, more = self.matrix.sizes
        return {"FIRST": self.first, "ELEMENTS": elements, "MORE": more}

    def convolve_all(self, x: torch.Tensor, taps: _Taps, *, silu: bool) -> torch.Tensor:
        """Convolves the rows of all sequences and writes their windows."""
        alone = not len(self.table.long)
        output = self.convolve(x, taps, self.table.pieces, silu=silu, write=alone)
        if not alone:
            self.write_windows(x, taps, self.table.all)
        return output

    def convolve(
        self,
        x: torch.Tensor,
        taps: _Taps,
        chunks: tuple[torch.Tensor, ...],
        *,
        silu: bool,
        write: bool = False,
    ) -> torch.Tensor:
        """Convolves the rows of chunks; writes windows if the chunks are whole sequences."""
        output, channels = x.new_empty(x.shape), x.shape[1]
        block = min(CHANNELS, power_of_two(channels))
        convolve_kernel[(len(chunks[0]), -(-channels // block))](
            output, x, taps.weight, taps.bias, *self.window.tensors, *self.places,
            *self.table.writes, *chunks, x.stride(0), self.stride,
            **self._convolution(taps, channels, block),
            TOKENS=TILE if self.table.longest > 1 else 1, SILU=silu, WRITE=write,
            **self.options, num_warps=4,
        )  # fmt: skip
        return output

    def write_windows(self, x: torch.Tensor, taps: _Taps, sequences: torch.Tensor) -> None:
        channels = x.shape[1]
        block = min(CHANNELS, power_of_two(channels))
        window_kernel[(len(sequences), -(-channels // block))](
            x, *self.window.tensors, *self.places, *self.table.writes, sequences,
            x.stride(0), self.stride, **self._convolution(taps, channels, block),
            **self.options, num_warps=4,
        )  # fmt: skip

    def _convolution(self, taps: _Taps, channels: int, block: int) -> dict[str, int]:
        elements, more = self.window.sizes
        return {
            "CHANNELS": channels,
            "SIZE": taps.size,
            "TAPS": power_of_two(taps.size - 1),
            "BLOCK": block,
            "ELEMENTS": elements,
            "MORE": more,
        }


class _Steps:
    """Makes the description of each layer's states; the layers of a step share one table."""

    def __init__(self, dependent_launches: DependentLaunches, launches: RecurrentLaunches) -> None:
        self._dependent_launches, self.launches = dependent_launches, launches
        self._transfer: Transfer | None = None
        self._table: _Table | None = None
        # By the layer's place: its cache, and its views as elements of windows and of matrices.
        self._pages: dict[int, tuple[LayerCache, _Pages, _Pages]] = {}

    def step(self, x: torch.Tensor, taps: _Taps, layer: int, memory: StateMemory) -> _Step | None:
        """The states of a layer whose rows are x; None if the kernels do not support it."""
        layout, batch = memory.layout, memory.batch
        known = x.dtype in FLOATS and x.dtype is layout.tensors[0].dtype and x.stride(-1) == 1
        if not known or not 2 <= taps.size <= LONGEST:
            return None
        place = layout.place(layer)
        pages = self._views(place, memory.caches[place], x.dtype)
        if pages is None:
            return None
        if self._transfer is None or self._transfer.device != x.device:
            self._transfer = Transfer(x.device)
        if self._table is None or self._table.batch is not batch:
            tokens, least = self.launches.delta.tokens, self.launches.least[x.element_size() == 4]
            self._table = _Table.of(batch, tokens, least, self._transfer)
        begin = layout.part(layer).start
        return _Step(
            table=self._table,
            window=pages[0],
            matrix=pages[1],
            places=(
                batch.sources[:, begin:],
                batch.targets[:, begin:],
                batch.fresh.view(torch.uint8),
            ),
            stride=batch.sources.stride(0),
            first=layout.tensors[0].num_bytes // 4,
            options=self._dependent_launches.small,
        )

    def _views(
        self, place: int, cache: LayerCache, dtype: torch.dtype
    ) -> tuple[_Pages, _Pages] | None:
        found = self._pages.get(place)
        if found is None or found[0] is not cache or found[1].tensors[0].dtype is not dtype:
            parts = [part for part in cache if part.numel()]
            whole = all(part.is_contiguous() and not part[0].nbytes % 4 for part in parts)
            if not whole or not 0 < len(parts) <= PAGES:
                return None
            found = cache, _Pages.of(parts, dtype), _Pages.of(parts, torch.float32)
            self._pages[place] = found
        return found[1:]


def _dense(rows: torch.Tensor) -> torch.Tensor:
    """Rows whose elements are next to each other."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _warps(elements: int) -> int:
    return min(8, max(1, elements // WARP_ELEMENTS))
