"""The recurrent parts of layers through the native kernels: one call for a layer and a whole ragged
batch. Plain torch computes what the kernels do not support.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from ..core.recurrent_state import StateBatch
from ..kernels.cpu.executor import LANES, Executor, pointer
from ..kernels.cpu.library import DTYPES
from ..kernels.cpu.structs import Convolution as ConvolutionStruct
from ..kernels.cpu.structs import Delta, Mamba, Mamba2, States
from .recurrent import (
    Convolution,
    DeltaWeights,
    GatedDelta,
    Mamba2Weights,
    MambaWeights,
    Selection,
    TorchGatedDelta,
    TorchSelectiveScan,
    TorchShortConvolution,
    TorchStateSpace,
)
from .state_memory import StateMemory

# Limits of the kernels: positions of a convolution, tensors of a layer's cache.
LONGEST, PAGES = 16, 2


class NativeRecurrences:
    """Makes recurrent parts that run on an executor's threads."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._steps = executor, _Steps()

    def gated_delta(self, weights: DeltaWeights) -> GatedDelta:
        if weights.by_channel:
            return TorchGatedDelta(weights)
        return NativeGatedDelta(weights, self._executor, self._steps)

    def state_space(self, weights: Mamba2Weights) -> "NativeStateSpace":
        return NativeStateSpace(weights, self._executor, self._steps)

    def selective_scan(self, weights: MambaWeights) -> "NativeSelectiveScan":
        return NativeSelectiveScan(weights, self._executor, self._steps)

    def short_convolution(self, convolution: Convolution) -> "NativeShortConvolution":
        return NativeShortConvolution(convolution, self._executor, self._steps)


class NativeGatedDelta:
    """A gated delta net between its products, natively."""

    def __init__(self, weights: DeltaWeights, executor: Executor, steps: "_Steps") -> None:
        self._executor, self._steps = executor, steps
        self._torch, self._convolution = TorchGatedDelta(weights), _Taps(weights.convolution)
        vectors = (-weights.a_log.exp(), weights.dt_bias, weights.norm)
        self._vectors = tuple(vector.float().contiguous() for vector in vectors)
        shape, (rates, dt_bias, norm) = weights.shape, self._vectors
        self._struct = Delta(
            convolution=self._convolution.struct,
            rates=rates.data_ptr(),
            dt_bias=dt_bias.data_ptr(),
            norm=norm.data_ptr(),
            key_heads=shape.key_heads,
            value_heads=shape.value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            epsilon=weights.eps,
        )

    def __call__(
        self,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
        decay: torch.Tensor,
        layer: int,
        memory: StateMemory,
    ) -> torch.Tensor:
        states = self._steps.states(mixed, self._convolution, layer, memory)
        if states is None:
            return self._torch(mixed, gate, beta, decay, layer, memory)
        output = mixed.new_empty(len(mixed), self._torch.weights.shape.value_width)
        rows = (mixed, gate.flatten(1), beta, decay)
        self._executor.gated_delta(self._struct, states, output, rows)
        return output


class NativeStateSpace:
    """A Mamba-2 layer between its products, natively."""

    def __init__(self, weights: Mamba2Weights, executor: Executor, steps: "_Steps") -> None:
        self._executor, self._steps = executor, steps
        self._torch, self._convolution = TorchStateSpace(weights), _Taps(weights.convolution)
        self._norm = None if weights.norm is None else weights.norm.float()
        vectors = (-weights.a_log.exp(), weights.dt_bias, weights.skip)
        self._vectors = tuple(vector.float().contiguous() for vector in vectors)
        shape, (rates, dt_bias, skip) = weights.shape, self._vectors
        self._struct = Mamba2(
            convolution=self._convolution.struct,
            rates=rates.data_ptr(),
            dt_bias=dt_bias.data_ptr(),
            skip=skip.data_ptr(),
            norm=pointer(self._norm),
            heads=shape.heads,
            head_dim=shape.head_dim,
            groups=shape.groups,
            state_size=shape.state_size,
            norm_first=weights.norm_first,
            epsilon=weights.eps,
        )

    def __call__(
        self,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        steps: torch.Tensor,
        layer: int,
        memory: StateMemory,
    ) -> torch.Tensor:
        states = self._steps.states(mixed, self._convolution, layer, memory)
        if states is None:
            return self._torch(mixed, gate, steps, layer, memory)
        output = mixed.new_empty(len(mixed), self._torch.weights.shape.width)
        self._executor.state_space(self._struct, states, output, (mixed, gate, steps))
        return output


class NativeSelectiveScan:
    """A Mamba layer between its outer products, natively, in two calls."""

    def __init__(self, weights: MambaWeights, executor: Executor, steps: "_Steps") -> None:
        self._executor, self._steps = executor, steps
        self._torch, self._convolution = TorchSelectiveScan(weights), _Taps(weights.convolution)
        padding = -weights.a_log.shape[1] % LANES
        self._rates = pad(-weights.a_log.float().exp(), (0, padding)).contiguous()
        self._skip = weights.skip.float().contiguous()
        channels, state_size = weights.a_log.shape
        self._struct = Mamba(
            rates=self._rates.data_ptr(),
            skip=self._skip.data_ptr(),
            channels=channels,
            state_size=state_size,
            stride=state_size + padding,
        )

    def __call__(
        self,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        select: Selection,
        layer: int,
        memory: StateMemory,
    ) -> torch.Tensor:
        states = self._steps.states(mixed, self._convolution, layer, memory)
        if states is None:
            return self._torch(mixed, gate, select, layer, memory)
        values, output = mixed.new_empty(mixed.shape), mixed.new_empty(mixed.shape)
        self._executor.convolve(self._convolution.struct, states, values, (mixed,), silu=True)
        steps, b, c = select(values)
        self._executor.selective_scan(self._struct, states, output, (values, steps, gate, b, c))
        return output


class NativeShortConvolution:
    """A convolution between two gates, natively."""

    def __init__(self, convolution: Convolution, executor: Executor, steps: "_Steps") -> None:
        self._executor, self._steps = executor, steps
        self._torch, self._convolution = TorchShortConvolution(convolution), _Taps(convolution)

    def __call__(
        self,
        x: torch.Tensor,
        before: torch.Tensor,
        after: torch.Tensor,
        layer: int,
        memory: StateMemory,
    ) -> torch.Tensor:
        states = self._steps.states(x, self._convolution, layer, memory)
        if states is None:
            return self._torch(x, before, after, layer, memory)
        output = x.new_empty(x.shape)
        self._executor.convolve(self._convolution.struct, states, output, (x, before, after))
        return output


class _Taps:
    """The weights of a convolution as the kernels read them: float32 [K, C]. `struct` points into
    them."""

    def __init__(self, convolution: Convolution) -> None:
        self._weight = convolution.weight.float().T.contiguous()
        self._bias = None if convolution.bias is None else convolution.bias.float()
        self.size, channels = self._weight.shape
        self.struct = ConvolutionStruct(
            weight=self._weight.data_ptr(),
            bias=pointer(self._bias),
            channels=channels,
            size=self.size,
        )


@dataclass(frozen=True, slots=True)
class _Runs:
    """A step's runs as arrays. The structure points into the others."""

    batch: StateBatch
    arrays: tuple[np.ndarray, ...]
    struct: States

    @classmethod
    def of(cls, batch: StateBatch) -> "_Runs":
        sequences = [run.sequence for run in batch.runs]
        ends = np.array([run.end for run in batch.runs], dtype=np.int64)
        run_start = np.searchsorted(sequences, np.arange(len(batch.fresh) + 1)).astype(np.int64)
        token_start = np.zeros(len(run_start), dtype=np.int64)
        token_start[1:] = ends[run_start[1:] - 1]
        write_start = np.zeros(len(ends) + 1, dtype=np.int64)
        np.cumsum([len(run.writes) for run in batch.runs], out=write_start[1:])
        writes = np.array([row for run in batch.runs for row in run.writes], dtype=np.int64)
        arrays = (token_start, run_start, ends, write_start, writes)
        names = ("token_start", "run_start", "run_end", "write_start", "writes")
        struct = States(
            stride=batch.sources.shape[1],
            fresh=batch.fresh.data_ptr(),
            num_seqs=len(batch.fresh),
            num_tokens=int(ends[-1]),
            **{name: array.ctypes.data for name, array in zip(names, arrays, strict=True)},
        )
        return cls(batch, arrays, struct)


class _Steps:
    """Describes the states of a step; what all layers share is made once."""

    def __init__(self) -> None:
        self._runs: _Runs | None = None

    def states(
        self, x: torch.Tensor, convolution: _Taps, layer: int, memory: StateMemory
    ) -> States | None:
        """The states of a layer whose rows are x; None if the kernels do not support it."""
        if x.dtype not in DTYPES or x.device.type != "cpu" or convolution.size > LONGEST:
            return None
        cache = [part for part in memory.caches[memory.layout.place(layer)] if part.numel()]
        if len(cache) > PAGES:
            return None
        if self._runs is None or self._runs.batch is not memory.batch:
            self._runs = _Runs.of(memory.batch)
        batch, struct = memory.batch, self._runs.struct
        begin = memory.layout.part(layer).start * batch.sources.itemsize
        struct.sources = batch.sources.data_ptr() + begin
        struct.targets = batch.targets.data_ptr() + begin
        struct.second = memory.layout.tensors[0].num_bytes
        for place in range(PAGES):
            part = cache[place] if place < len(cache) else None
            struct.pages[place] = pointer(part)
            struct.page_bytes[place] = 0 if part is None else part[0].nbytes
        return struct
