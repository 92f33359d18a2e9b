"""Every Triton kernel compiles for the GPUs it is meant for, spills no registers, fits their shared
memory, has its next keys on their way while it multiplies on tensor cores, and is launched without
a number that only the device knows.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# 89 has the least shared memory of a program: 99 KiB.
RUNS = {"Hopper": (90, "mixtral"), "Ada, fp8": (89, "gemma2-fp8")}
PRODUCTS = {
    *("decode_kernel", "prefill_kernel", "linear_kernel", "lora_shrink_kernel"),
    *("skinny_kernel", "skinny_silu_kernel"),
}
# It multiplies once: nothing more could be on its way.
SINGLE = {"lora_expand_kernel"}
KERNELS = PRODUCTS | SINGLE | {
    "store_kernel", "rotate_kernel", "merge_kernel", "rms_norm_kernel", "silu_mul_kernel",
    "stage_kernel",
}  # fmt: skip
# Of a run: products, and what else it has beside KERNELS.
MORE = {
    "Hopper": ({"grouped_kernel"}, {"route_kernel", "place_kernel", "mix_kernel"}),
    "Ada, fp8": ({"float8_linear_kernel"}, {"round_rows_kernel"}),
}

Compiler = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    @cache
    def run(name: str) -> list[dict[str, Any]]:
        capability, shape = RUNS[name]
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
        environment["PYTHONPATH"] = os.pathsep.join([str(BENCHMARKS), *sys.path])
        command = [sys.executable, str(BENCHMARKS / "triton_aot.py"), "--json", "--brief"]
        command += ["--capability", str(capability), "--shape", shape]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.mark.parametrize("name", RUNS)
def test_every_kernel_compiles_and_fits(name: str, compiled: Compiler) -> None:
    found = compiled(name)
    assert {one["kernel"] for one in found} == KERNELS.union(*MORE[name])
    for one in found:
        assert one["target"].startswith(f"sm_{RUNS[name][0]}")
        assert one["spilled"] == 0 and one["resident"] > 0


@pytest.mark.parametrize("name", RUNS)
def test_tensor_cores_multiply_while_the_next_keys_come(name: str, compiled: Compiler) -> None:
    using = {one["kernel"]: one for one in compiled(name) if one["products"]}
    assert using.pop(*SINGLE)["in_flight"] == 0
    assert set(using) == PRODUCTS | MORE[name][0]
    assert all(one["in_flight"] > 0 for one in using.values())
    assert ("wgmma" in using["prefill_kernel"]["products"]) == name.startswith("Hopper")
    # A thread's copies of keys; those of 4 bytes are the block table's.
    assert set(using["prefill_kernel"]["copy_sizes"]) <= {"4", "8", "16"}
