"""The engine's CUDA side on a device that computes nothing (`tests/support/null_cuda`): recordings,
streams, events, pinned copies, memory, and Triton's kernels compiled and launched. Not tested: the
results, and how long they take.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from headrace_testing.null_cuda import build, environment, refusal
from headrace_testing.null_cuda_scenes import SAMPLED, STEPS

REASON = refusal()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no null CUDA device: {REASON}"),
    pytest.mark.timeout(900),  # the first test waits for all scenes, and compiles their kernels
]
DEVICE = ("capture_rules", "races", "full")
# Scenes whose requests end, and leave no blocks in use.
FEATURES = (
    "eager",
    "deterministic",
    "eight_bits",
    "four_bits",
    "adapters",
    "swapped",
    "speculation",
    "draft_model",
    "fused_norms",
)
ANSWERS = ("timer", "decoding", "grammar", "embeddings", "replaced")
# Engines of tiny models would make millions of blocks in the memory of an H100.
MEMORY = 4 << 30
RELAUNCHED = 2  # kernels that copy a step's tokens into the next step's inputs
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    """The facts of all scenes, which run in one process."""
    library = build(tmp_path_factory.mktemp("null-cuda"))
    base = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    base["NULL_CUDA_MEMORY"] = str(MEMORY)
    # The device's scenes come last: after a failed capture, torch may believe that it still
    # captures.
    names = (*ANSWERS, *FEATURES, *DEVICE)
    command = [sys.executable, "-m", "headrace_testing.null_cuda_scenes", *names]
    done = subprocess.run(
        command, env=environment(library, base), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {line.pop("scene"): line for line in lines}
    assert set(found) == set(names)
    return found


@pytest.mark.parametrize("name", (*ANSWERS, *FEATURES))
def test_a_scene_breaks_no_rule_and_leaks_nothing(name: str, scenes: dict[str, Facts]) -> None:
    facts = scenes[name]
    assert "raised" not in facts, facts["raised"]
    assert facts["complaints"] == []
    assert facts["graphs"] == 0
    assert facts["allocated"] == 0


@pytest.mark.parametrize("name", FEATURES)
def test_requests_end(name: str, scenes: dict[str, Facts]) -> None:
    length = 60 if name == "swapped" else 12
    assert scenes[name]["ended"] == [[length, "length"]]


def test_a_decode_step_waits_for_one_event_and_copies_once_each_way(
    scenes: dict[str, Facts],
) -> None:
    facts = scenes["decoding"]["steady"]
    counts = facts["counts"]
    assert len(facts["waits"]) == counts["cudaEventSynchronize"] == STEPS, facts["waits"]
    assert counts["cudaGraphLaunch"] == counts["stage_kernel"] == STEPS
    assert counts["cudaMemcpyAsync"] == 2 * STEPS
    assert counts["cudaLaunchKernel"] == (RELAUNCHED + 1) * STEPS, "and the largest logits"
    assert counts["cuLaunchKernelEx"] == STEPS
    memory = {name for name in counts if "Malloc" in name or "Free" in name or "Alloc" in name}
    assert not memory


def test_a_step_that_samples_waits_for_nothing_more(scenes: dict[str, Facts]) -> None:
    facts = scenes["decoding"]["random"]
    assert len(facts["waits"]) == STEPS, facts["waits"]
    assert facts["counts"]["sample_kernel"] == STEPS


def test_norms_that_are_parts_of_products_are_recorded(scenes: dict[str, Facts]) -> None:
    counts = scenes["fused_norms"]["counts"]
    layers = counts["small_batch_silu_kernel"]
    assert layers > 0 and counts["small_batch_kernel"] == 3 * layers, (
        "o, down, and the next layer's"
    )


def test_swapped_blocks_are_copied_without_a_wait(scenes: dict[str, Facts]) -> None:
    assert scenes["swapped"]["swapped"] > 0
    assert scenes["swapped"]["waits"] == []


def test_kernels_are_timed_even_after_one_that_fails(scenes: dict[str, Facts]) -> None:
    facts = scenes["timer"]
    assert "capture" in facts["refused"]
    assert 0 < facts["times"][0] < facts["times"][1], "of one kernel and of two"
    assert facts["kept"] <= 4 << 20, "memory that streams share is used again"


def test_a_model_gets_the_memory_of_the_one_that_it_replaces(scenes: dict[str, Facts]) -> None:
    first, second = scenes["replaced"]["blocks"]
    assert second == pytest.approx(first, rel=0.01)


def test_other_configurations_finish_too(scenes: dict[str, Facts]) -> None:
    assert scenes["decoding"]["ended"] == [[[12, "length"]]] * len(SAMPLED)
    assert scenes["decoding"]["beams"] == [3, 3]
    assert scenes["grammar"]["texts"] == ["a" * 8] * 4
    assert scenes["embeddings"]["sizes"] == [256] * 5


def test_the_null_device_enforces_cudas_rules(scenes: dict[str, Facts]) -> None:
    """Without these rules the other tests would prove nothing."""
    rules = scenes["capture_rules"]
    assert all(rules["refused"].values()), rules["refused"]
    assert not any(rules["accepted"].values()), rules["accepted"]
    assert scenes["full"]["full"]
    races = scenes["races"]
    assert races["told"] == 1, "pinned memory was overwritten before its copy"
    assert (races["before"], races["after"]) == (-1, 0), "read before and after the wait"
