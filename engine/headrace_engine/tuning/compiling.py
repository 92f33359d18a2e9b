"""Compiles the kernels of several candidates at once, each in a thread: most of what measuring
takes is compiling, and a compiler uses one core."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import triton

from ..triton_kernels.jit import only_compiling
from .autotuner import Run

MOST_THREADS = 16


def compile_together(
    runs: Iterable[Run], failures: tuple[type[Exception], ...] = (RuntimeError,)
) -> None:
    """All that `runs` launch and that is not compiled yet. Nothing is launched, so what they give
    means nothing; what cannot be compiled fails when it is launched, as without this."""
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        with triton.AsyncCompileMode(pool, ignore_errors=True), only_compiling() as launched:
            for run in runs:
                with suppress(*failures):
                    run()
        for kernel in launched:
            kernel.forget_failed()
