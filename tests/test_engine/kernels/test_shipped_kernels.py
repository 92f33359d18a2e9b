"""An engine on a GPU without a C compiler, as in its image: on the null CUDA device, with the
kernels that the image's build compiles. Kernels that have not changed since an earlier session are
not compiled again.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_engine.kernels.triton.shipped import SHIPPED
from headrace_testing.kernel_store import ENVIRONMENT as STORED
from headrace_testing.null_cuda import build, environment, refusal
from headrace_testing.null_cuda_forks import Programs

REASON = refusal()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no null CUDA device: {REASON}"),
    pytest.mark.timeout(900),  # kernels are compiled on one core
]
MANAGER = "headrace_engine.kernels.triton.shipped:ShippedFirst"
COMPILE, DECODE = "headrace_testing.few_candidates", "headrace_testing.decode"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Programs that find the device."""
    library = build(tmp_path_factory.mktemp("null-cuda"))
    base = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    programs = Programs(environment(library, base))
    yield programs
    programs.close()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    """The prefix of an installation with the compiled kernels of the demo model, as in the
    Dockerfile."""
    prefix = tmp_path_factory.mktemp("prefix")
    given = {**STORED, "TRITON_CACHE_DIR": str(prefix / SHIPPED)}
    programs.run(COMPILE, ["headrace-demo"], given).check_returncode()
    for source in prefix.rglob("*.source"):
        source.unlink()
    return prefix


def decode(programs: Programs, prefix: Path, written: Path) -> subprocess.CompletedProcess[str]:
    """Decodes without a compiler on the PATH."""
    path = written.parent / "programs"
    path.mkdir()
    if (file := shutil.which("file")) is not None:  # part of the platform's name in Triton's keys
        (path / "file").symlink_to(file)
    given = {
        "TRITON_CACHE_DIR": str(written),
        "TRITON_CACHE_MANAGER": MANAGER,
        "PATH": str(path),
        "CC": None,
    }
    return programs.run(DECODE, [], given, prefix)


def test_without_a_compiler_an_engine_needs_precompiled_kernels(
    programs: Programs, tmp_path: Path
) -> None:
    done = decode(programs, tmp_path / "nothing", tmp_path / "written")
    assert done.returncode != 0
    assert "Failed to find C compiler" in done.stderr


def test_a_first_start_of_the_demo_model_compiles_nothing(
    programs: Programs, prefix: Path, tmp_path: Path
) -> None:
    done = decode(programs, prefix, tmp_path / "written")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == '{"tokens": [6, 6, 6, 6, 6, 6]}'
    written = [path for path in (tmp_path / "written").rglob("*") if path.is_file()]
    assert written == []


def test_kernels_that_are_not_precompiled_are_compiled_and_cached(
    programs: Programs, prefix: Path, tmp_path: Path
) -> None:
    for kernel in list(prefix.rglob("rotate_kernel.cubin")):
        shutil.rmtree(kernel.parent)
    done = decode(programs, prefix, tmp_path / "written")
    assert done.returncode == 0, done.stderr[-3000:]
    written = {path.name for path in (tmp_path / "written").rglob("*.cubin")}
    assert written == {"rotate_kernel.cubin"}


def test_the_image_says_where_its_kernels_are() -> None:
    dockerfile = (Path(__file__).parents[3] / "Dockerfile").read_text()
    assert f"TRITON_CACHE_DIR=/opt/headrace/{SHIPPED}\n" in dockerfile
    assert f"TRITON_CACHE_MANAGER={MANAGER}\n" in dockerfile


@pytest.mark.parametrize("capability", [80, 89])
def test_kernels_of_other_generations_are_compiled_too(
    capability: int, programs: Programs, tmp_path: Path
) -> None:
    given = {**STORED, "TRITON_CACHE_DIR": str(tmp_path), "NULL_CUDA_CAPABILITY": str(capability)}
    programs.run(COMPILE, ["headrace-demo"], given).check_returncode()
    compiled = [path.read_text() for path in tmp_path.rglob("decode_kernel.json")]
    assert any(f'"arch": {capability}' in text for text in compiled)
