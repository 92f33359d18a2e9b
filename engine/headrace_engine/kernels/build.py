"""Compiles the native kernels: one shared library for each instruction set of this architecture.

Called by the build hook at installation, or by hand: `python -m headrace_engine.kernels.build`.
Uses only the standard library. Must not import torch, and no library is linked against an OpenMP
runtime of its own: the symbols resolve to the one that torch has loaded, so both share its threads.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("attention.cpp", "decoder.cpp", "elementwise.cpp", "pool.cpp")
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
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """`cpu_flags` are the names in /proc/cpuinfo that a CPU must have to run the library."""

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
    """`skipped` tells for each instruction set that the compiler does not know what it said."""

    libraries: tuple[Path, ...]
    skipped: dict[str, str]


class BuildError(Exception):
    """The kernels cannot be compiled here; the engine runs without them, slower."""


def instruction_sets(machine: str) -> tuple[InstructionSet, ...]:
    """What there is for an architecture, `platform.machine()`'s name, best first."""
    return X86_64 if machine.lower() in ("x86_64", "amd64") else (BASELINE,)


def library_path(name: str, folder: Path = HERE) -> Path:
    return folder / f"libheadrace_{name}.so"


def build(folder: Path = HERE, cxx: str | None = None) -> BuildReport:
    """Compiles into `folder` every library that is missing or older than its sources.

    `cxx` is the compiler's command; None takes $CXX, or else c++, g++ or clang++ of the PATH.
    Raises BuildError where there is no compiler, or it makes no library at all.
    """
    compiler = _find_compiler(cxx or os.environ.get("CXX"))
    targets = instruction_sets(platform.machine())
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        tried = list(pool.map(lambda target: _try(compiler, target, folder), targets))
    libraries = tuple(result for result in tried if isinstance(result, Path))
    skipped = {
        target.name: str(result)
        for target, result in zip(targets, tried, strict=True)
        if isinstance(result, BuildError)
    }
    if not libraries:
        raise BuildError(next(iter(skipped.values())))
    return BuildReport(libraries, skipped)


def _try(compiler: list[str], target: InstructionSet, folder: Path) -> Path | BuildError:
    try:
        return _compile(compiler, target, folder)
    except BuildError as error:
        return error


def _find_compiler(command: str | None) -> list[str]:
    if command:
        words = shlex.split(command)
        if shutil.which(words[0]):
            return words
        raise BuildError(f"CXX names {words[0]!r}, which is no program on the PATH")
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler on the PATH: install g++ or clang++, or set CXX")


def _compile(compiler: list[str], target: InstructionSet, folder: Path) -> Path:
    """Renames the result into place, so that a running engine keeps the file it has mapped."""
    library = library_path(target.name, folder)
    stamp = library.with_suffix(".stamp")
    digest = _digest(compiler, target)
    if library.exists() and stamp.exists() and stamp.read_text() == digest:
        return library
    partial = library.with_suffix(f".{os.getpid()}.tmp")
    objects = [partial.with_suffix(f".{Path(source).stem}.o") for source in SOURCES]
    try:
        for source, output in zip(SOURCES, objects, strict=True):
            compile_flags = (*COMMON_FLAGS, *target.flags, "-c", str(HERE / source))
            _run([*compiler, *compile_flags, "-o", str(output)])
        # Without -fopenmp: its symbols stay open, to be resolved by torch's runtime.
        _run([*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(partial)])
        partial.replace(library)
    finally:
        for path in (*objects, partial):
            path.unlink(missing_ok=True)
    stamp.write_text(digest)
    return library


def _digest(compiler: list[str], target: InstructionSet) -> str:
    # Nothing of it may be a set: those are written in another order by each process.
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
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()[-2000:]}")


def main() -> int:
    try:
        report = build()
    except BuildError as error:
        sys.stderr.write(f"native kernels not built: {error}\n")
        return 1
    for name, reason in report.skipped.items():
        sys.stderr.write(f"no kernels for {name}: {reason}\n")
    sys.stdout.write("".join(f"{path}\n" for path in report.libraries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
