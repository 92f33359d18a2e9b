"""Loads the native kernels that `build.py` compiled: the best library that this CPU can run.

Nothing is loaded at import. If there is no library, `load` says why and callers use plain torch.
Call it after torch is imported: the OpenMP symbols come from torch's runtime.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import torch

from .build import library_path, runnable_sets

INTERFACE = 15
FORCE_ISA = "HEADRACE_CPU_ISA"
DTYPES = (torch.float32, torch.bfloat16)


class KernelsUnavailable(Exception):
    """No native kernels can be loaded; the message says why and what to do."""


_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Kernels:
    """The functions of one library, as attention.h, elementwise.h, decoder.h and recurrence.h
    declare them.

    Tensors are passed as `data_ptr()`; the caller is responsible for shapes, strides and lifetimes.
    """

    def __init__(self, isa: str, path: Path) -> None:
        self.isa = isa
        self._library = _open(path)
        version = self._bind("interface", ctypes.c_int)
        if version() != INTERFACE:
            raise KernelsUnavailable(f"{path} is of another version: {REMEDY}")
        if self._bind("prepare", ctypes.c_int)():
            raise KernelsUnavailable(f"the system does not let this process use {isa}")
        self.paged_attention = self._bind(
            "paged_attention", ctypes.c_int, *[_POINTER] * 5, *[_INT] * 3, _POINTER, _POINTER
        )
        self.latent_attention = self._bind(
            "latent_attention", ctypes.c_int, *[_POINTER] * 4, *[_INT] * 3, _POINTER, _POINTER
        )
        self.rms_norm = self._bind("rms_norm", None, *[_POINTER] * 3, *[_INT] * 3, _FLOAT, _INT)
        self.add_rms_norm = self._bind(
            "add_rms_norm", None, *[_POINTER] * 4, *[_INT] * 2, _FLOAT, _INT
        )
        self.rotate_qkv = self._bind("rotate_qkv", None, *[_POINTER] * 5, *[_INT] * 5, _FLOAT, _INT)
        self.silu_mul = self._bind("silu_mul", None, *[_POINTER] * 2, *[_INT] * 4)
        self.argmax = self._bind("argmax", None, *[_POINTER] * 4, *[_INT] * 4)
        self.gated_delta = self._bind("gated_delta", ctypes.c_int, *[_POINTER] * 8, _INT)
        self.state_space = self._bind("state_space", ctypes.c_int, *[_POINTER] * 7, _INT)
        self.convolve = self._bind("convolve", ctypes.c_int, *[_POINTER] * 7, *[_INT] * 2)
        self.selective_scan = self._bind("selective_scan", ctypes.c_int, *[_POINTER] * 9, _INT)
        self.executor_create = self._bind("executor_create", _POINTER, _INT)
        self.executor_destroy = self._bind("executor_destroy", None, _POINTER)
        self.forward = self._bind("forward", ctypes.c_int, *[_POINTER] * 3)
        self.linear_forward = self._bind(
            "linear_forward", ctypes.c_int, *[_POINTER] * 3, _INT, _POINTER, *[_INT] * 3
        )
        self.experts_forward = self._bind(
            "experts_forward", ctypes.c_int, *[_POINTER] * 6, *[_INT] * 2
        )
        self.pack_weight = self._bind("pack_weight", None, *[_POINTER] * 4, *[_INT] * 3)
        self.pack_int4 = self._bind("pack_int4", None, *[_POINTER] * 3, *[_INT] * 2)
        self.panel_bytes = self._bind("panel_bytes", ctypes.c_int64, *[_INT] * 3)
        self.pack_panels = self._bind(
            "pack_panels", None, *[_POINTER] * 2, _INT, _POINTER, *[_INT] * 2
        )
        self.unpack_outputs = self._bind("unpack_outputs", None, *[_POINTER] * 4, *[_INT] * 3)
        # Outputs of a linear layer that are adjacent in memory.
        self.panel = self._bind("panel", ctypes.c_int64)()

    def _bind(self, name: str, result: type | None, *arguments: type) -> Callable[..., int]:
        function: Callable[..., int] = getattr(self._library, f"headrace_{name}")
        function.restype = result  # type: ignore[attr-defined]  # a ctypes function, typed at run time
        function.argtypes = arguments  # type: ignore[attr-defined]
        return function


REMEDY = "run `python -m headrace_engine.kernels.cpu.build --all`, which needs a C++ compiler"


def load(isa: str | None = None) -> Kernels:
    """Loads the kernels for `isa`; None means $HEADRACE_CPU_ISA, or else the best that runs here.

    Raises KernelsUnavailable if there is no such library or it cannot be loaded.
    """
    wanted = isa or os.environ.get(FORCE_ISA)
    runnable = [target.name for target in runnable_sets()]
    if wanted is not None and wanted not in runnable:
        raise KernelsUnavailable(f"{FORCE_ISA} {wanted!r} is not one of {', '.join(runnable)}")
    problem = KernelsUnavailable(f"no compiled kernels in {library_path('').parent}: {REMEDY}")
    for name in [wanted] if wanted else runnable:
        path = library_path(name)
        if not path.exists():
            continue
        try:
            return Kernels(name, path)
        except KernelsUnavailable as error:
            problem = error
    raise problem


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        _share_openmp()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be loaded: {error}") from error


def _share_openmp() -> None:
    """Makes the symbols of torch's OpenMP runtime visible to libraries that are loaded later."""
    for runtime in openmp_runtimes():
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)


def openmp_runtimes() -> frozenset[str]:
    """Files of the OpenMP runtimes in this process."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return frozenset(path for path in paths if Path(path).name.startswith(_RUNTIMES))


_RUNTIMES = ("libgomp", "libiomp5", "libomp")
