"""Compiles the kernels of several candidates at once, each in a thread.

Most of the time of tuning is compilation, and a compiler uses one core.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import triton

from ..kernels.triton.jit import only_compiling
from .autotuner import Run

MOST_THREADS = 16


def compile_together(
    runs: Iterable[Run], failures: tuple[type[Exception], ...] = (RuntimeError,)
) -> None:
    """Compiles everything that `runs` launch and that is not compiled yet. Nothing is launched, so
    results are meaningless. A kernel that does not compile fails later, at its launch."""
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        with triton.AsyncCompileMode(pool, ignore_errors=True), only_compiling() as launched:
            for run in runs:
                with suppress(*failures):
                    run()
        for kernel in launched:
            kernel.forget_failed()
