"""Runs the tests whose numbers depend on the CPU's instructions at each level that this machine can
pretend to have (`make test-cpus`).

A level is what torch, oneDNN, numpy, its BLAS and the native kernels may use, all by environment
variables. Before its tests run, a process says what each of them really uses. MKL, torch's BLAS on
x86-64, is limited too, but does not say what it uses, and obeys the limit only on Intel's CPUs.
"""

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headrace_engine.kernels.cpu import build, library

ENGINE = "tests/test_engine/"
TESTS = (
    *(
        f"{ENGINE}{folder}/test_{name}.py"
        for folder, names in {
            "attention": ("attention", "cpu_attention", "fp8_kv", "latents", "triton_attention"),
            "kernels": ("blocks", "kernels", "small_batch_gemm"),
            "lora": ("triton_lora",),
            "models": ("deterministic", "encoders", "fused", "models", "quantization", "rotary"),
            "offline": ("embeddings",),
            "operators": (
                "experts", "fused_norm", "native_experts", "packed_weights", "recurrent",
                "triton_deterministic", "triton_ops",
            ),
            "sampling": ("logit_masks", "sampler", "triton_sampling"),
        }.items()
        for name in names
    ),
    "tests/test_benchmarks/test_programs.py::test_kernels",
)  # fmt: skip
WIDE = ("X86_V4", "AVX512")  # the name that numpy gives its loops for AVX-512


@dataclass(frozen=True)
class Level:
    """`name` is that of the native kernels; `printed` is a pattern of the name that oneDNN prints
    for the level `onednn`."""

    name: str
    torch: str
    onednn: str
    printed: str
    blas: str
    mkl: str
    wide: bool = True

    def environment(self) -> dict[str, str]:
        made = {
            library.FORCE_ISA: self.name,
            "ATEN_CPU_CAPABILITY": self.torch,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "OPENBLAS_CORETYPE": self.blas,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
        }
        if not self.wide and (loops := wide_loops()):
            made["NPY_DISABLE_CPU_FEATURES"] = " ".join(loops)
        return made


LEVELS = (
    Level("avx2", "avx2", "AVX2", "Intel AVX2", "Haswell", "AVX2", wide=False),
    Level("avx512", "avx512", "AVX512_CORE", ".*AVX512BW.*", "SkylakeX", "AVX512"),
    Level("avx512_bf16", "avx512", "AVX512_CORE_BF16", ".* bfloat16 support", "SkylakeX", "AVX512"),
    Level("amx", "avx512", "AVX512_CORE_AMX", ".* Intel AMX .*", "SkylakeX", "AVX512"),
)


@dataclass(frozen=True)
class Used:
    """The instruction sets that a process uses."""

    kernels: str
    torch: str
    onednn: str
    blas: str
    wide: bool

    def __str__(self) -> str:
        loops = "with" if self.wide else "without"
        return (
            f"kernels {self.kernels}, torch {self.torch}, oneDNN {self.onednn}, "
            f"OpenBLAS {self.blas}, numpy {loops} AVX-512"
        )

    def is_of(self, level: Level) -> bool:
        return (
            self.kernels == level.name
            and self.torch.lower() == level.torch
            and re.fullmatch(level.printed, self.onednn) is not None
            and self.blas == level.blas
            and self.wide == level.wide
        )


def chosen_sets() -> list[str]:
    """Instruction sets whose kernels are tested: the forced one, or all that this CPU runs."""
    forced = os.environ.get(library.FORCE_ISA)
    return [forced] if forced else [target.name for target in build.runnable_sets()]


def wide_loops() -> list[str]:
    """numpy's loops for AVX-512 that this process may use."""
    found: list[str] = np.show_config(mode="dicts")["SIMD Extensions"]["found"]
    return [name for name in found if name.startswith(WIDE)]


def print_used() -> None:
    """Computes once, so that oneDNN prints its level, and prints the other libraries' levels."""
    torch.ops.mkldnn._reorder_linear_weight(torch.ones(64, 64), 64)
    kernels, capability = library.load().isa, torch.backends.cpu.get_cpu_capability()
    print_line(json.dumps([kernels, capability, _blas_core(), bool(wide_loops())]))


def print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _blas_core() -> str:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    for path in {line.split()[-1] for line in lines if "openblas" in line}:
        loaded = ctypes.CDLL(path)
        for name in ("scipy_openblas_get_corename64_", "openblas_get_corename"):
            if hasattr(loaded, name):
                function = getattr(loaded, name)
                function.restype = ctypes.c_char_p
                return str(function().decode())
    return "none"


def used(environment: dict[str, str]) -> Used:
    done = subprocess.run(
        [sys.executable, __file__, "--print-used"],
        env=environment | {"ONEDNN_VERBOSE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"no process starts at this level: {done.stderr.strip()}")
    printed = re.search(r"cpu,isa:(.*)", done.stdout)
    kernels, capability, core, wide = json.loads(done.stdout.splitlines()[-1])
    return Used(kernels, capability, printed[1] if printed else "none", core, wide)


def run(level: Level, arguments: list[str]) -> str:
    """Runs the tests at a level and returns how they ended. Raises RuntimeError if the machine
    cannot run at this level."""
    environment = os.environ | level.environment()
    found = used(environment)
    print_line(f"\n{level.name}: {found}")
    if not found.is_of(level):
        raise RuntimeError(
            f"{level.name} cannot be emulated on this CPU: {found} instead of {level}"
        )
    began = time.monotonic()
    command = ["-n", "2", "--dist", "loadfile", "-q", *TESTS, *arguments]
    done = subprocess.run([sys.executable, "-m", "pytest", *command], env=environment, check=False)
    ended = "failed" if done.returncode else "passed"
    return f"{ended} in {time.monotonic() - began:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--print-used", action="store_true", help="print what this process uses, and end"
    )
    parser.add_argument("--all", action="store_true", help="the level of this machine too")
    options, arguments = parser.parse_known_args()
    if options.print_used:
        print_used()
        return 0
    os.environ.pop(library.FORCE_ISA, None)
    runnable = [target.name for target in build.runnable_sets()]
    ends = {}
    for level in LEVELS:
        if level.name not in runnable:
            ends[level.name] = "not run: this machine lacks it"
        elif level.name == runnable[0] and not options.all:
            ends[level.name] = "not run: this is the machine's own level, which `make test` uses"
        else:
            ends[level.name] = run(level, arguments)
    print_line("\n" + "\n".join(f"{name:<12} {end}" for name, end in ends.items()))
    return int(any(end.startswith("failed") for end in ends.values()))


if __name__ == "__main__":
    sys.exit(main())
