"""Records what the host launches as CUDA graphs, and measures their memory."""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch

Run = Callable[[], torch.Tensor]
# Bytes of free device memory.
Free = Callable[[], int]


class Capture(Protocol):
    def __call__(self, run: Run) -> Run:
        """Captures what `run` launches.

        Each call of the result launches it again, with the same output tensor.
        """


class CudaCapture:
    """Records CUDA graphs. All share one memory pool, because only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        run()  # compiles kernels and grows scratch memory, which must not be recorded
        torch.cuda.synchronize()
        make_graph: Any = torch.cuda.CUDAGraph
        graph = make_graph()
        with no_collection(), torch.cuda.graph(graph, pool=self._pool):
            output = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


@contextmanager
def no_collection() -> Iterator[None]:
    """Stops Python's garbage collector. A collected CUDA graph calls the driver, and that makes a
    capture invalid."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class SharedLogits:
    """The logits of the last step of all graphs, in one tensor: the pool could not reuse a graph's
    own output."""

    def __init__(self) -> None:
        self._logits: torch.Tensor | None = None

    def keep(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns a copy of `logits`, which the next call overwrites. The first call must have the
        most rows."""
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        return self._logits[: len(logits)].copy_(logits)


class MeteredCapture:
    """Wraps another capture; stores in `free_after` the free memory after each graph."""

    def __init__(self, capture: Capture, free: Free) -> None:
        self._capture, self._free = capture, free
        self.free_after: list[int] = []

    def __call__(self, run: Run) -> Run:
        if not self.free_after:
            run()  # memory that stays allocated without graphs does not count
            self.free_after.append(self._free())
        made = self._capture(run)
        self.free_after.append(self._free())
        return made

    def extrapolated(self, recordings: int) -> int:
        """Estimates the bytes of this many graphs: the first one allocates the shared pool, and
        each further one takes as much as the largest measured one."""
        first, *further = [max(0, before - after) for before, after in pairwise(self.free_after)]
        return first + (recordings - 1) * max(further, default=0)


def at_least(steps: tuple[int, ...], wanted: int) -> int | None:
    """The first of ascending `steps` that is at least `wanted`; None if there is none."""
    place = bisect_left(steps, wanted)
    return steps[place] if place < len(steps) else None
