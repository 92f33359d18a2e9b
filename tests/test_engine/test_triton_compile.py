"""Every Triton kernel compiles for the GPUs it is meant for, uses their tensor cores, fits their
shared memory, and is launched without a number that only the device knows.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
# Bytes that a program may take: H100 and H200; of Ampere the smaller, sm_86.
SHARED = {90: 227 * 1024, 80: 99 * 1024}
RUNS = {
    "Hopper": (90, ["--fp8", "--softcap", "30"]),
    "Ampere": (80, ["--dtype", "fp16", "--window", "700", "--head-dim", "64"]),
}
KERNELS = (
    "store_kernel", "rotate_kernel", "decode_kernel", "merge_kernel", "prefill_kernel",
    "rms_norm_kernel", "silu_mul_kernel", "linear_kernel",
)  # fmt: skip

Compiler = Callable[[str], list[dict[str, object]]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    @cache
    def run(name: str) -> list[dict[str, object]]:
        capability, options = RUNS[name]
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
        environment["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), *sys.path])
        command = [sys.executable, "-m", "headrace_testing.triton_compile"]
        command += ["--capability", str(capability), *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.mark.parametrize("name", RUNS)
def test_every_kernel_compiles(name: str, compiled: Compiler) -> None:
    capability, _ = RUNS[name]
    found = compiled(name)
    assert {one["kernel"] for one in found} == set(KERNELS)
    for one in found:
        assert f"sm_{capability}" in str(one["target"])
        assert int(str(one["shared"])) <= SHARED[capability]


@pytest.mark.parametrize("name", RUNS)
def test_attention_uses_tensor_cores(name: str, compiled: Compiler) -> None:
    using = {one["kernel"] for one in compiled(name) if one["products"]}
    assert using == {"decode_kernel", "prefill_kernel", "linear_kernel"}
