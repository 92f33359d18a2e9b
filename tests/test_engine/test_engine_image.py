"""The engine's image itself, on the null CUDA device, as its pod would run it. `ENGINE_ROOT` names
its root filesystem. Without it the tests are skipped, because building it takes gigabytes.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_engine.kernels.triton.shipped import SHIPPED
from headrace_testing.image_root import device, environment, inside
from headrace_testing.null_cuda import refusal
from headrace_testing.valkey import ValkeyServer

ROOT = os.environ.get("ENGINE_ROOT")
REASON = refusal() or (None if ROOT else "ENGINE_ROOT names no root filesystem of the image")
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no engine image: {REASON}"),
    pytest.mark.timeout(900),
]
DECODE = ("python", "/tmp/given/decode.py")
LIST = f"{' '.join(DECODE)} && find $TRITON_CACHE_DIR -type f"


DOCTOR = ("headrace", "doctor", "--engine")


def run(
    command: tuple[str, ...], hidden: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    assert ROOT is not None
    root = Path(ROOT)
    with device() as given:
        entered = inside(root, given, command, environment() | variables, hidden)
        return subprocess.run(entered, capture_output=True, text=True, check=False)


def test_decode_steps_of_the_demo_model_compile_nothing_and_launch() -> None:
    done = run(("sh", "-c", LIST))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ['{"tokens": [6, 6, 6, 6, 6, 6]}'], "no file is written"


def test_without_precompiled_kernels_the_image_cannot_run_on_a_gpu() -> None:
    done = run(DECODE, hidden=f"/opt/headrace/{SHIPPED}")
    assert done.returncode != 0
    assert "Failed to find C compiler" in done.stderr


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of an engine that is set to run on a GPU, and its Redis."""
    server = ValkeyServer(tmp_path / "redis")
    server.start()
    yield {"HEADRACE_ENGINE_DEVICE": "cuda", "HEADRACE_ENGINE_REDIS_URL": server.url}
    server.kill()


def test_the_doctor_finds_no_problem_in_the_image(engine: dict[str, str]) -> None:
    done = run(DOCTOR, **engine)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NVIDIA H100" in done.stdout and "FAIL" not in done.stdout


def test_the_doctor_names_what_a_pod_without_a_gpu_lacks(engine: dict[str, str]) -> None:
    hidden = f"/opt/headrace/{SHIPPED}"
    done = run(DOCTOR, hidden, LD_PRELOAD="", TRITON_LIBCUDA_PATH="", **engine)
    assert done.returncode == 1
    remedies = [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("- ")]
    assert remedies == ["- driver", "- gpu", "- triton"]
