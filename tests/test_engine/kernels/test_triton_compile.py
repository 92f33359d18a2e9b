"""Every Triton kernel compiles for its GPUs, spills no registers and fits their shared memory. It
loads the next keys while it multiplies on tensor cores, and its launch needs no number that only
the device knows.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)  # the first test waits for all kernels to compile
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
# 89 has the least shared memory for a program: 99 KiB.
RUNS = {"Hopper": (90, "mixtral"), "Ada, fp8": (89, "gemma2-fp8")}
PRODUCTS = {
    *("decode_kernel", "prefill_kernel", "linear_kernel", "lora_shrink_kernel"),
    *("small_batch_kernel", "small_batch_silu_kernel"),
}
# An option with which kernels are compiled for programmatic dependent launch, except
# NOT_OVERLAPPING.
OVERLAPPING = "--dependent"
NOT_OVERLAPPING = {
    *("stage_kernel", "sample_kernel", "store_kernel", "prefill_kernel", "linear_kernel"),
}
# They only multiply one tile, so there is no next tile to load meanwhile.
SINGLE = {"lora_expand_kernel", "expert_expand_kernel"}
KERNELS = PRODUCTS | {
    "store_kernel", "rotate_kernel", "merge_kernel", "rms_norm_kernel", "silu_mul_kernel",
    "stage_kernel", "sample_kernel", "lora_expand_kernel", "vector_product_kernel",
}  # fmt: skip
# The kernels of a run: products, and others besides KERNELS.
MORE = {
    "Hopper": (
        {"grouped_kernel", "expert_shrink_kernel", "packed_linear_kernel", "grouped_packed_kernel"},
        {"route_kernel", "place_kernel", "mix_kernel", "dequantize_packed_kernel"}
        | {"expert_gather_kernel", "expert_activate_kernel", "expert_expand_kernel"},
    ),
    "Ada, fp8": ({"small_batch_float8_kernel"}, {"round_rows_kernel"}),
}

# Kernels whose loops are tested; to disassemble one takes as long as to compile it.
MEMORY_LOOPS = "decode_kernel", "small_batch_kernel", "small_batch_silu_kernel", "grouped_kernel"
PACKED_LOOPS = ("packed_linear_kernel", "grouped_packed_kernel")
LOOPS = (*MEMORY_LOOPS, *PACKED_LOOPS, "prefill_kernel")

# The kernels of recurrent layers, in every variant.
RECURRENT = {
    *("gated_delta_kernel", "delta_chunk_kernel", "delta_states_kernel", "delta_gate_kernel"),
    *("state_space_kernel", "space_gate_kernel", "selective_scan_kernel"),
    *("convolve_kernel", "window_kernel"),
}
RECURRENT_RUNS = {
    "recurrent": (["--capability", "90"], RECURRENT),
    "recurrent, overlapping": (
        [OVERLAPPING, "--brief"],
        RECURRENT
        - {"delta_chunk_kernel", "delta_states_kernel", "delta_gate_kernel"}
        - {"window_kernel"},
    ),
}

Compiled = dict[str, list[dict[str, Any]]]
# One process for all runs, as importing torch takes seconds.
PROGRAM = """
import json, sys, triton_aot
for name, arguments in json.loads(sys.argv[1]).items():
    print(json.dumps({"run": name}))
    assert triton_aot.main(arguments) == 0, name
"""


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    """The kernels of each run. Those that have not changed since an earlier session are read from
    Triton's cache, whose keys contain their source and options."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(BENCHMARKS), *sys.path])
    runs = {}
    for name in (*RUNS, OVERLAPPING):
        capability, shape = RUNS.get(name, (90, "8b"))
        more = {"Hopper": ["--loops", *LOOPS], OVERLAPPING: [OVERLAPPING]}.get(name, [])
        wanted = ["--capability", str(capability), "--shape", shape]
        runs[name] = ["--json", "--brief", *wanted, *more]
    for name, (arguments, _) in RECURRENT_RUNS.items():
        shapes = ["--shape", "qwen3-next", "nemotron-h", "jamba"]
        runs[name] = ["--json", *shapes, *arguments, "--only", *sorted(RECURRENT)]
    command = [sys.executable, "-c", PROGRAM, json.dumps(runs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: Compiled = {}
    kernels: list[dict[str, Any]] = []
    for line in map(json.loads, done.stdout.splitlines()):
        if "run" in line:
            kernels = found.setdefault(line["run"], [])
        else:
            kernels.append(line)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_every_kernel_compiles_and_fits(name: str, compiled: Compiled) -> None:
    found = compiled[name]
    assert {one["kernel"] for one in found} == KERNELS.union(*MORE[name])
    for one in found:
        assert one["target"].startswith(f"sm_{RUNS[name][0]}")
        assert one["spilled"] == 0 and one["resident"] > 0


@pytest.mark.parametrize("name", RECURRENT_RUNS)
def test_kernels_of_recurrent_layers_compile_and_fit(name: str, compiled: Compiled) -> None:
    """Chunks of prompts are multiplied on tensor cores."""
    found, (_, kernels) = compiled[name], RECURRENT_RUNS[name]
    assert {one["kernel"] for one in found} == kernels
    assert all(one["dependent"] == ("overlapping" in name) for one in found)
    assert not any(one["hazards"] or not one["resident"] for one in found)
    multiplying = {one["kernel"] for one in found if one["products"]}
    chunked = {"delta_chunk_kernel", "delta_states_kernel", "state_space_kernel"}
    assert multiplying == (chunked if name == "recurrent" else set())


@pytest.mark.parametrize("name", RUNS)
def test_tensor_cores_multiply_while_the_next_keys_are_loaded(
    name: str, compiled: Compiled
) -> None:
    using = {one["kernel"]: one for one in compiled[name] if one["products"]}
    assert all(using.pop(kernel)["in_flight"] == 0 for kernel in SINGLE & using.keys())
    assert set(using) == PRODUCTS | MORE[name][0]
    assert all(one["in_flight"] > 0 for one in using.values())
    assert ("wgmma" in using["prefill_kernel"]["products"]) == name.startswith("Hopper")
    # A thread's copies of keys; copies of 4 bytes are those of the block table.
    assert set(using["prefill_kernel"]["copy_sizes"]) <= {"4", "8", "16"}


def test_loops_leave_multiprocessors_time_to_wait_for_memory(compiled: Compiled) -> None:
    """The counted instructions of a loop take about half as long as its loads on an H200."""
    from compiled.loops import Loop

    found = {
        one["kernel"]: [loop for loop in (Loop(**fields) for fields in one["loops"]) if loop.tensor]
        for one in compiled["Hopper"]
    }
    for kernel in MEMORY_LOOPS:
        (loop,) = found[kernel]
        assert loop.share < 0.55 and max(loop.issue, loop.arithmetic) < loop.memory / 4
    for kernel in PACKED_LOOPS:
        (loop,) = found[kernel]
        assert max(loop.issue, loop.arithmetic) < 0.55 * loop.memory, "4 bits have to be widened"
    inner, diagonal = found["prefill_kernel"]
    assert max(inner.issue, inner.arithmetic, inner.shared) < 0.75 * inner.tensor
    assert inner.instructions < diagonal.instructions, "only tiles on the diagonal are masked"


@pytest.mark.parametrize("name", RUNS)
def test_kernels_without_dependent_launch_do_not_wait(name: str, compiled: Compiled) -> None:
    assert not any(one["dependent"] or one["hazards"] for one in compiled[name])


def test_before_they_wait_kernels_only_prefetch_weights(compiled: Compiled) -> None:
    """Otherwise they would read data before it is written, or overwrite data that is still being
    read."""
    found = compiled[OVERLAPPING]
    assert all(one["dependent"] for one in found)
    assert not any(one["hazards"] or one["spilled"] for one in found), "wait in time"
    assert NOT_OVERLAPPING.isdisjoint(one["kernel"] for one in found)
    assert {one["kernel"] for one in found} >= KERNELS - NOT_OVERLAPPING
    products = [one["variant"] for one in found if one["kernel"].startswith("small_batch_")]
    for norm, kernels in (("add True", 1), ("parts 128", 2)):
        assert sum(norm in one for one in products) == kernels, "norms within products, too"


@pytest.mark.parametrize(
    "statements, problem",
    [
        ("", "does not wait"),
        ("ld.global.b32 %r1, [%rd1]; griddepcontrol.wait;", "ld.global"),
        ("@%p1 st.global.b32 [%rd1], %r1;\ngriddepcontrol.wait;", "st.global"),
        ("atom.global.add.u32 %r1, [%rd1], 1;\ngriddepcontrol.wait;", "atom"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16;\ngriddepcontrol.wait;", "cp.async"),
        ("@%p1 bra $L1;\ngriddepcontrol.wait;", "bra"),
    ],
)
def test_a_kernel_that_does_not_wait_in_time_is_found(statements: str, problem: str) -> None:
    from compiled.hazards import hazards

    fetch = "ld.param.b64 %rd1, [a]; // of all\n@%p cp.async.bulk.prefetch.L2.global [%rd1], %r2;\n"
    (found,) = hazards(f".entry kernel()\n{fetch}{statements}", early=True)
    assert problem in found
    fetches = f".entry kernel()\n$L0:\n{fetch}@%p1 bra $L0;\n"
    assert hazards(f"{fetches}griddepcontrol.wait;\nst.global", early=True) == []
