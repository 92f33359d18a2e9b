"""Checks what an engine's pod needs beside the model and Redis.

That is a driver, Triton's launcher, shared memory, and a volume for downloads and compiled kernels.
Imports no torch.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .finding import Finding, fail, ok, warning

_SECONDS = 120
_SHARED = Path("/dev/shm")  # noqa: S108
_MIN_SHARED = 2**26  # Docker's default; the ranks of one model need more
_MIN_SHARED_RANKS = 2**30
_MIN_FREE = 2**30
# Asks in a process of its own: Triton imports torch.
_ASK_TRITON = """
import hashlib, json, os, shutil, sysconfig
from pathlib import Path
from triton.backends.nvidia import driver
from triton.runtime.build import platform_key
from triton.runtime.cache import get_cache_manager
source = Path(driver.__file__).with_name("driver.c").read_text()
key = hashlib.sha256((source + platform_key()).encode()).hexdigest()
launcher = get_cache_manager(key).get_file("cuda_utils" + sysconfig.get_config_var("EXT_SUFFIX"))
compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
print(json.dumps({"launcher": launcher, "compiler": compiler}))
"""


def wants_gpu(environ: Mapping[str, str]) -> bool:
    """Whether the engine's settings require a GPU."""
    return environ.get("HEADRACE_ENGINE_DEVICE", "auto").startswith("cuda")


def driver(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the CUDA version of the node's driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        if wants_gpu(environ):
            yield fail(
                "driver",
                "libcuda.so.1 was not found, and the engine is set to run on cuda",
                "ask for a GPU (spec.engine.gpu) on nodes with NVIDIA's driver and its container "
                "toolkit",
            )
        else:
            yield ok("driver", "none; the engine runs on the CPU")
        return
    found = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(found)) != 0:
        yield fail("driver", "libcuda.so.1 does not answer", "reinstall the node's driver")
        return
    yield ok("driver", f"CUDA {found.value // 1000}.{found.value % 1000 // 10}")


def launcher(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks whether Triton can launch kernels: its launcher is in the image or can be compiled."""
    if find_spec("triton") is None:
        return  # an installation without GPUs
    answer = _ask_triton()
    if isinstance(answer, str):
        yield warning("triton", f"does not load: {answer}", "reinstall the engine's packages")
    elif answer["launcher"]:
        yield ok("triton", "its launcher is compiled")
    elif answer["compiler"]:
        yield ok("triton", f"its launcher will be compiled by {answer['compiler']}")
    elif wants_gpu(environ):
        yield fail(
            "triton",
            "its launcher is not compiled, and there is no C compiler",
            "use the engine's image, or install gcc and Python's headers",
        )
    else:
        yield warning("triton", "no launcher and no C compiler", "needed on GPUs only: install gcc")


def _ask_triton() -> dict[str, Any] | str:
    try:
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-c", _ASK_TRITON],
            capture_output=True, text=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer in {_SECONDS} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["it crashed"])[-1]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def shared_memory(environ: Mapping[str, str], folder: Path = _SHARED) -> Iterator[Finding]:
    """Checks whether the processes of one engine have enough shared memory."""
    if not folder.is_dir():
        yield warning("shared memory", f"{folder} does not exist", "mount a tmpfs there")
        return
    ranks = int(environ.get("HEADRACE_ENGINE_TENSOR_PARALLEL_SIZE", "1") or 1)
    wanted = _MIN_SHARED if ranks == 1 else _MIN_SHARED_RANKS
    size = shutil.disk_usage(folder).total
    detail = f"{size / 2**20:.0f} MiB at {folder}"
    if size < wanted:
        remedy = f"give it {wanted / 2**20:.0f} MiB: spec.engine.sharedMemory, or --shm-size"
        yield (fail if ranks > 1 else warning)("shared memory", detail, remedy)
    else:
        yield ok("shared memory", detail)


def volume(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks whether weights and kernels can be stored."""
    home = Path(environ.get("XDG_CACHE_HOME") or environ.get("HOME") or "/")
    folders = [home, Path(environ.get("TMPDIR") or "/tmp")]  # noqa: S108
    for folder in folders:
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            yield fail("volume", f"{folder} cannot be written", "mount a volume there")
            return
    free = shutil.disk_usage(home).free
    detail = f"{home}, {free / 2**30:.1f} GiB free"
    if free < _MIN_FREE:
        yield warning("volume", detail, "give the cache more: spec.engine.cache.size")
    else:
        yield ok("volume", detail)
