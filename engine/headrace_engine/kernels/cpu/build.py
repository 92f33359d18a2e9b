"""Compiles the native kernels: one shared library for each instruction set of this architecture.

The build hook calls it at installation. By hand, `python -m headrace_engine.kernels.cpu.build`
compiles for this CPU alone, with `--all` for every instruction set. It uses only the standard
library and must not import torch. No library is linked against an OpenMP runtime: the symbols
resolve to the runtime that torch has loaded, so both share its threads.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = (
    "attention.cpp",
    "blocks.cpp",
    "decoder.cpp",
    "elementwise.cpp",
    "experts.cpp",
    "gated_delta.cpp",
    "latent.cpp",
    "mamba.cpp",
    "mamba2.cpp",
    "pool.cpp",
)
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-fPIC",
    "-fopenmp",
)
TIMEOUT_S = 1800  # for one source; some seconds where nothing else runs


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One instruction set. `cpu_flags` are the names in /proc/cpuinfo that a CPU must have to run
    it."""

    name: str
    flags: tuple[str, ...]
    cpu_flags: frozenset[str]


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_WIDE = "-mprefer-vector-width=512"
_BF16 = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", _WIDE)

BASELINE = InstructionSet("baseline", (), frozenset())
# Best first. The last one of each architecture runs on every CPU of it.
X86_64 = (
    InstructionSet(
        "amx",
        (*_BF16, "-mamx-tile", "-mamx-bf16"),
        _AVX512 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"},
    ),
    InstructionSet("avx512_bf16", _BF16, _AVX512 | {"avx512_bf16", "avx512_vnni"}),
    InstructionSet("avx512", ("-march=x86-64-v4", _WIDE), _AVX512),
    InstructionSet("avx2", ("-march=x86-64-v3",), _AVX2),
    BASELINE,
)


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The libraries, and in `skipped` the message of a compiler that does not support a set."""

    libraries: tuple[Path, ...]
    skipped: dict[str, str]


class BuildError(Exception):
    """The kernels cannot be compiled here; the engine runs without them, slower."""


def instruction_sets(machine: str) -> tuple[InstructionSet, ...]:
    """The instruction sets of an architecture, `platform.machine()`'s name, best first."""
    return X86_64 if machine.lower() in ("x86_64", "amd64") else (BASELINE,)


def runnable_sets() -> tuple[InstructionSet, ...]:
    """The instruction sets that this CPU supports, best first."""
    flags = cpu_flags()
    return tuple(each for each in instruction_sets(platform.machine()) if each.cpu_flags <= flags)


def cpu_flags() -> frozenset[str]:
    """The CPU's features, by the kernel's names; empty if there is no /proc/cpuinfo."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def library_path(name: str, folder: Path = HERE) -> Path:
    return folder / f"libheadrace_{name}.so"


def build(folder: Path = HERE, cxx: str | None = None) -> BuildReport:
    """Compiles into `folder` every library that is missing or older than its sources.

    `cxx` is the compiler's command; None takes $CXX, or else c++, g++ or clang++ from the PATH.
    Raises BuildError if there is no compiler, or it makes no library at all.
    """
    return _build(instruction_sets(platform.machine()), folder, cxx)


def build_for_this_cpu(folder: Path = HERE, cxx: str | None = None) -> BuildReport:
    """Like `build`, for one library: the best that the compiler can make for this CPU.

    Raises BuildError.
    """
    skipped: dict[str, str] = {}
    for target in runnable_sets():
        try:
            report = _build((target,), folder, cxx)
        except BuildError as error:
            skipped[target.name] = str(error)
        else:
            return BuildReport(report.libraries, skipped)
    raise BuildError(next(iter(skipped.values())))


def _build(targets: Sequence[InstructionSet], folder: Path, cxx: str | None) -> BuildReport:
    compiler = _find_compiler(cxx or os.environ.get("CXX"))
    with ThreadPoolExecutor(os.cpu_count()) as pool, ThreadPoolExecutor(len(targets)) as waiting:
        compile_one = partial(_try, pool, compiler, folder)
        tried = list(waiting.map(compile_one, targets))
    libraries = tuple(result for result in tried if isinstance(result, Path))
    skipped = {
        target.name: str(result)
        for target, result in zip(targets, tried, strict=True)
        if isinstance(result, BuildError)
    }
    if not libraries:
        raise BuildError(next(iter(skipped.values())))
    return BuildReport(libraries, skipped)


def _try(
    pool: Executor, compiler: list[str], folder: Path, target: InstructionSet
) -> Path | BuildError:
    try:
        return _compile(pool, compiler, folder, target)
    except BuildError as error:
        return error


def _find_compiler(command: str | None) -> list[str]:
    if command:
        words = shlex.split(command)
        if shutil.which(words[0]):
            return words
        raise BuildError(f"CXX names {words[0]!r}, which is not a program on the PATH")
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler on the PATH: install g++ or clang++, or set CXX")


def _compile(pool: Executor, compiler: list[str], folder: Path, target: InstructionSet) -> Path:
    """Compiles, then renames the result into place: a running engine keeps the file it has
    mapped."""
    library = library_path(target.name, folder)
    stamp = library.with_suffix(".stamp")
    digest = _digest(compiler, target)
    if library.exists() and stamp.exists() and stamp.read_text() == digest:
        return library
    partial = library.with_suffix(f".{os.getpid()}.tmp")
    objects = [partial.with_suffix(f".{Path(source).stem}.o") for source in SOURCES]
    try:
        flags = (*compiler, *COMMON_FLAGS, *target.flags)
        commands = (
            [*flags, "-c", str(HERE / source), "-o", str(output)]
            for source, output in zip(SOURCES, objects, strict=True)
        )
        compiled = [pool.submit(_run, command) for command in commands]
        wait(compiled)
        for each in compiled:
            each.result()
        # Without -fopenmp: torch's runtime resolves the symbols.
        _run([*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(partial)])
        partial.replace(library)
    finally:
        for path in (*objects, partial):
            path.unlink(missing_ok=True)
    stamp.write_text(digest)
    return library


def _digest(compiler: list[str], target: InstructionSet) -> str:
    # No sets in here: each process prints their elements in another order.
    command = (compiler, COMMON_FLAGS, target.name, target.flags)
    content = hashlib.sha256(repr(command).encode())
    for path in sorted((*HERE.glob("*.cpp"), *HERE.glob("*.h"))):
        content.update(path.read_bytes())
    return content.hexdigest()


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(  # noqa: S603 - the compiler that the user's environment names
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"{command[0]} did not finish within {TIMEOUT_S} s: try again when the machine is less "
            f"busy, with `{sys.executable} -m headrace_engine.kernels.cpu.build`"
        ) from error
    except OSError as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()[-2000:]}")


def main() -> int:
    try:
        report = build() if "--all" in sys.argv[1:] else build_for_this_cpu()
    except BuildError as error:
        sys.stderr.write(f"native kernels not built: {error}\n")
        return 1
    for name, reason in report.skipped.items():
        sys.stderr.write(f"no kernels for {name}: {reason}\n")
    sys.stdout.write("".join(f"{path}\n" for path in report.libraries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
