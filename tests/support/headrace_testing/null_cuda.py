"""Runs a Python program on a CUDA device that computes nothing: `tests/support/null_cuda`.

torch and Triton find an H100; its kernels are compiled, loaded and launched, streams, events,
captures and memory follow CUDA's rules, and all data read from it is zeros. By hand:

    PYTHONPATH=engine:common:tests/support python -m headrace_testing.null_cuda PROGRAM ...
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

SOURCES = Path(__file__).parents[1] / "null_cuda"
# The library against which Triton links its launcher, and which it loads.
LIBRARY = "libcuda.so.1"
CUDA_MAJOR = "13"
FLAGS = (
    "-std=gnu11",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-Wno-missing-field-initializers",
    "-Werror",
    "-fPIC",
    "-fvisibility=hidden",
    "-shared",
    f"-Wl,-soname,{LIBRARY}",
)


def refusal() -> str | None:
    """The reason why this machine cannot have the device, or None."""
    cuda = torch.version.cuda
    if cuda is None or cuda.split(".")[0] != CUDA_MAJOR:
        return f"torch is built for CUDA {cuda}, the null device for CUDA {CUDA_MAJOR}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, which has some of CUDA's headers"
    if compiler() is None:
        return "there is no C compiler: set CC or install gcc"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers are not installed, which Triton's launcher is compiled with"
    return None


def compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc"))


def build(folder: Path) -> Path:
    """Compiles the library into `folder`. Raises RuntimeError with the compiler's messages."""
    target, command = folder / LIBRARY, compiler()
    assert command is not None, "call `refusal` first"
    sources = map(str, sorted(SOURCES.glob("*.c")))
    arguments = [
        *FLAGS,
        *(f"-I{one}" for one in _headers()),
        "-o",
        str(target),
        *sources,
        "-ldl",
        "-lpthread",
    ]
    done = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the null CUDA device cannot be compiled:\n{done.stderr}")
    return target


def _headers() -> list[Path]:
    """Folders with CUDA's headers: those of the runtime that torch was installed with, then those
    of Triton.

    Triton's may be of another version, so they are used only for headers that the first lacks.
    """
    found = importlib.util.find_spec("triton")
    assert found is not None and found.origin is not None
    return [
        Path(torch.__file__).parent.parent / "nvidia" / f"cu{CUDA_MAJOR}" / "include",
        Path(found.origin).parent / "backends" / "nvidia" / "include",
    ]


def environment(library: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of processes that see the device."""
    kept = {name: value for name, value in base.items() if name != "TRITON_INTERPRET"}
    return {**kept, "LD_PRELOAD": str(library), "TRITON_LIBCUDA_PATH": str(library.parent)}


def _built() -> Path:
    """The library, compiled once for each state of its sources."""
    state = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir())))
    folder = Path(tempfile.gettempdir()) / f"headrace-null-cuda-{state.hexdigest()[:16]}"
    if not (folder / LIBRARY).exists():
        with tempfile.TemporaryDirectory() as made:
            folder.mkdir(exist_ok=True)
            shutil.copy(build(Path(made)), folder / "new")
        (folder / "new").rename(folder / LIBRARY)
    return folder / LIBRARY


def main() -> None:
    if (reason := refusal()) is not None:
        raise SystemExit(reason)
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment(_built(), os.environ))


if __name__ == "__main__":
    main()
