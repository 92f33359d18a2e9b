"""An engine on a GPU where there is no C compiler, as in its image: on the null CUDA device, with
what the image's build would have compiled.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_engine.kernels.triton.shipped import SHIPPED
from headrace_testing.null_cuda import build, environment, refusal

REASON = refusal()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no null CUDA device: {REASON}"),
    pytest.mark.timeout(900),  # kernels are compiled, by one core
]
MANAGER = "headrace_engine.kernels.triton.shipped:ShippedFirst"
# An installation has its kernels below its prefix; this one differs from Python's own.
DECODE = "import sys; sys.prefix = sys.argv[1]; from headrace_testing.decode import main; main()"


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds the device."""
    library = build(tmp_path_factory.mktemp("null-cuda"))
    base = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return environment(library, base)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory, device: dict[str, str]) -> Path:
    """The prefix of an installation with the demo model's kernels, compiled as in the
    Dockerfile."""
    prefix = tmp_path_factory.mktemp("prefix")
    given = {"TRITON_CACHE_DIR": str(prefix / SHIPPED), "TRITON_STORE_BINARY_ONLY": "1"}
    command = [sys.executable, "-m", "headrace_engine.compile_kernels", "headrace-demo"]
    subprocess.run(command, env={**device, **given}, check=True)
    for source in prefix.rglob("*.source"):
        source.unlink()
    return prefix


def decode(device: dict[str, str], prefix: Path, written: Path) -> subprocess.CompletedProcess[str]:
    """Decodes without a compiler on the PATH."""
    programs = written.parent / "programs"
    programs.mkdir()
    if (file := shutil.which("file")) is not None:  # part of the platform's name in Triton's keys
        (programs / "file").symlink_to(file)
    given = {
        "TRITON_CACHE_DIR": str(written),
        "TRITON_CACHE_MANAGER": MANAGER,
        "PATH": str(programs),
    }
    kept = {name: value for name, value in device.items() if name != "CC"}
    command = [sys.executable, "-c", DECODE, str(prefix)]
    return subprocess.run(
        command, env={**kept, **given}, capture_output=True, text=True, check=False
    )


def test_without_a_compiler_an_engine_needs_kernels_compiled_ahead(
    device: dict[str, str], tmp_path: Path
) -> None:
    done = decode(device, tmp_path / "nothing", tmp_path / "written")
    assert done.returncode != 0
    assert "Failed to find C compiler" in done.stderr


def test_a_first_start_of_the_demo_model_compiles_nothing(
    device: dict[str, str], prefix: Path, tmp_path: Path
) -> None:
    done = decode(device, prefix, tmp_path / "written")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == '{"tokens": [6, 6, 6, 6, 6, 6]}'
    written = [path for path in (tmp_path / "written").rglob("*") if path.is_file()]
    assert written == []


def test_kernels_not_compiled_ahead_are_compiled_and_kept(
    device: dict[str, str], prefix: Path, tmp_path: Path
) -> None:
    for kernel in list(prefix.rglob("rotate_kernel.cubin")):
        shutil.rmtree(kernel.parent)
    done = decode(device, prefix, tmp_path / "written")
    assert done.returncode == 0, done.stderr[-3000:]
    written = {path.name for path in (tmp_path / "written").rglob("*.cubin")}
    assert written == {"rotate_kernel.cubin"}


def test_the_image_says_where_its_kernels_are() -> None:
    dockerfile = (Path(__file__).parents[3] / "Dockerfile").read_text()
    assert f"TRITON_CACHE_DIR=/opt/headrace/{SHIPPED}\n" in dockerfile
    assert f"TRITON_CACHE_MANAGER={MANAGER}\n" in dockerfile


@pytest.mark.parametrize("capability", [80, 89])
def test_kernels_of_other_generations_are_compiled_too(
    capability: int, device: dict[str, str], tmp_path: Path
) -> None:
    given = {"TRITON_CACHE_DIR": str(tmp_path), "NULL_CUDA_CAPABILITY": str(capability)}
    command = [sys.executable, "-m", "headrace_engine.compile_kernels", "headrace-demo"]
    subprocess.run(command, env={**device, **given}, check=True)
    compiled = [path.read_text() for path in tmp_path.rglob("decode_kernel.json")]
    assert any(f'"arch": {capability}' in text for text in compiled)
