"""`triton.jit` with types: the interface of a compiled kernel for the rest of the package.

With TRITON_INTERPRET=1 in the environment before the first import, kernels run on CPU tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import triton
import triton.language as tl

# Pointers, scalars and tiles.
Value = Any


class Kernel(Protocol):
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """The kernel's launcher over `grid` programs."""

    def __call__(self, *arguments: Value) -> Value:
        """A call from another kernel."""


class CompiledKernel(triton.JITFunction):  # type: ignore[misc]  # Triton has no types
    """Triton's JIT function, whose launches can be suppressed."""

    def run(self, *args: Value, grid: tuple[int, ...], warmup: bool, **kwargs: Value) -> Value:
        if (launched := _LEFT_OUT.get()) is not None:
            launched.add(self)
            warmup = True
        return super().run(*args, grid=grid, warmup=warmup, **kwargs)

    def forget_failed(self) -> None:
        """Forgets kernels that threads failed to compile, so that a launch raises the error."""
        for kernels, *_ in self.device_caches.values():
            for key, kernel in list(kernels.items()):
                if isinstance(kernel, triton.FutureKernel):
                    del kernels[key]


# The kernels whose launches this thread has suppressed, while it only compiles.
_LEFT_OUT: ContextVar[set[CompiledKernel] | None] = ContextVar("left_out", default=None)


@contextmanager
def only_compiling() -> Iterator[set[CompiledKernel]]:
    """Compiles kernels that this thread launches, if needed, without running them; yields these
    kernels."""
    launched: set[CompiledKernel] = set()
    token = _LEFT_OUT.set(launched)
    try:
        yield launched
    finally:
        _LEFT_OUT.reset(token)


def jit(function: Callable[..., Value]) -> Kernel:
    """A kernel that is compiled once for each set of dtypes and constants."""
    return _made(function, [])


def jit_unspecialized(*names: str) -> Callable[[Callable[..., Value]], Kernel]:
    """Like `jit`, but no value of the integers called `names` causes another compilation."""

    def decorate(function: Callable[..., Value]) -> Kernel:
        return _made(function, list(names))

    return decorate


def _made(function: Callable[..., Value], unspecialized: list[str]) -> Kernel:
    make = triton.jit if triton.knobs.runtime.interpret else CompiledKernel
    kernel: Kernel = make(function, do_not_specialize=unspecialized)
    return kernel


@jit
def await_earlier(DEPENDENT: tl.constexpr) -> None:
    """Marks where a kernel's memory accesses may begin: after the end of all earlier kernels.

    With DEPENDENT (see `dependent_launch`) the kernel may have begun before they ended. Before this
    call, its programs may only prefetch. So when a kernel has ended, all kernels before it have
    ended.
    """
    if DEPENDENT == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if DEPENDENT > 0:
        tl.extra.cuda.gdc_wait()
    if DEPENDENT == 1:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def prefetch(place: tl.tensor) -> None:
    """Prefetches the line that `place` points to into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [place.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def prefetch_rows(rows: tl.tensor, size: tl.tensor, LINES: tl.constexpr) -> None:
    """Prefetches the first `size` bytes of what `rows` [N] point to into the L2 cache.

    `size` is a multiple of PREFETCH_MULTIPLE, or 0. Both the rows and each thread's stretch of them
    lie at multiples of 16 bytes. A thread prefetches one stretch, one thread after the other in
    hardware; with LINES a warp's threads prefetch one cache line each.
    """
    THREADS: tl.constexpr = tl.extra.cuda.num_threads()
    PIECES: tl.constexpr = THREADS // rows.shape[0] if THREADS > rows.shape[0] else 1
    if LINES:
        for begin in range(0, size, PIECES * 128):
            offsets = begin + (tl.arange(0, PIECES) * 128)[None, :]
            prefetch(rows.to(tl.int64)[:, None] + tl.minimum(offsets, size - 128))
    else:
        piece = size // PIECES
        tl.inline_asm_elementwise(
            """{ .reg .pred some; setp.gt.s32 some, $2, 0;
            @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }""",
            "=r,l,r",
            [rows.to(tl.int64)[:, None] + (tl.arange(0, PIECES) * piece)[None, :], piece],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
