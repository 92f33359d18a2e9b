"""Checks CPU, GPU and memory. torch runs in a separate process."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...machine import available_memory, cpu_flags, usable_cores, visible_gpus
from .finding import Finding, fail, ok, warning

_TORCH_SECONDS = 120
_ASK_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
free = [torch.cuda.mem_get_info(i)[0] for i in range(len(names))]
print(json.dumps({"version": torch.__version__, "built_for": torch.version.cuda,
                  "gpus": names, "free": free}))
"""
_FAST_FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16", "asimd")
_X86 = frozenset({"x86_64", "AMD64"})
_HEADROOM = 1.3  # weights plus the working memory of a small engine


def processor() -> Iterator[Finding]:
    flags = cpu_flags()
    useful = [flag for flag in _FAST_FLAGS if flag in flags]
    detail = f"{usable_cores()} cores, {platform.machine()}: {', '.join(useful) or 'no SIMD flags'}"
    if platform.machine() in _X86 and flags and "avx2" not in flags:
        yield warning(
            "cpu", detail, "without AVX2 the CPU engine is slow: use a newer CPU or a GPU"
        )
    else:
        yield ok("cpu", detail)


def kernels() -> Iterator[Finding]:
    """Checks whether the engine's native CPU kernels were compiled at the installation."""
    spec = find_spec("headrace_engine")
    if spec is None or spec.origin is None:
        return  # the check of the packages reports it
    built = sorted(path.stem for path in Path(spec.origin).parent.glob("kernels/cpu/*.so"))
    if built:
        names = (name.removeprefix("libheadrace_") for name in built)
        yield ok("kernels", f"compiled for {', '.join(names)}")
    else:
        yield warning(
            "kernels",
            "not compiled: engines on the CPU run in plain torch",
            "install g++, then headrace again: pip install --force-reinstall --no-deps headrace",
        )


def accelerator(*, needed: bool = False) -> Iterator[Finding]:
    """Checks whether torch sees the GPUs that the driver sees, and at least one if `needed`."""
    if find_spec("torch") is None:
        return  # the check of the packages reports it
    answer = _ask_torch()
    if isinstance(answer, str):
        yield fail("torch", f"does not load: {answer}", "reinstall it: pip install --force torch")
        return
    driver = len(visible_gpus(os.environ))
    if driver and not answer["gpus"]:
        yield warning(
            "gpu",
            f"the driver has {driver}, torch {answer['version']} sees none",
            "install a torch built for your CUDA driver (see pytorch.org), or update the driver",
        )
    elif answer["gpus"]:
        pairs = zip(answer["gpus"], answer["free"], strict=True)
        yield ok("gpu", ", ".join(f"{name}, {free / 2**30:.1f} GiB free" for name, free in pairs))
    elif needed:
        yield fail(
            "gpu",
            f"torch {answer['version']}, built for CUDA {answer['built_for']}, sees none",
            "give the container a whole GPU (no MIG slice), and the node a driver for that CUDA",
        )
    else:
        yield ok("gpu", "none; the engine runs on the CPU")


def _ask_torch() -> dict[str, Any] | str:
    command = [sys.executable, "-c", _ASK_TORCH]
    try:
        result = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=_TORCH_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_TORCH_SECONDS} s"
    if result.returncode != 0:
        return (result.stderr.strip().splitlines() or ["it crashed"])[-1]
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


def memory(weights: int | None) -> Iterator[Finding]:
    """Checks whether `weights` bytes fit into the free memory."""
    free = available_memory()
    if free is None:
        return
    detail = f"{free / 2**30:.1f} GiB available"
    if weights is None or free >= weights * _HEADROOM:
        yield ok("memory", detail)
        return
    detail = f"{detail}, the weights take {weights / 2**30:.1f} GiB"
    yield warning("memory", detail, "serve a smaller model, on a GPU, or with --dtype bfloat16")
