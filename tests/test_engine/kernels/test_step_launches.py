"""The launches of a decode step on a GPU: few kernels, and none that waits for the host, which
could not be recorded. Counted on tensors without memory.
"""

import json
from typing import Any

import pytest
import torch

import step_launches
from gpu_benchmark.shapes import SHAPES

RECORDED = (
    "llama3-rope", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3-partial", "mixtral",
    "qwen2-moe", "qwen3-moe", "olmo3", "granite", "ministral3", "glm4",
    "gpt-oss",
)  # fmt: skip


def test_a_layer_of_llama_is_ten_launches() -> None:
    """Four products, two norms with the residual sum, and one launch each for: rotation and cache
    writes, attention, the merge of its parts, SiLU."""
    found = step_launches.decode_step(SHAPES["8b"].config(), 1, 1024)
    assert found.per_layer == 10
    assert found.total == 10 * 32 + 5  # embedding, cos, sin, first norm, head
    # in a single part
    assert step_launches.decode_step(SHAPES["1b"].config(), 1, 64).per_layer == 9
    fewest = step_launches.decode_step(SHAPES["8b"].config(), 1, 1024, fewest=True)
    assert fewest.per_layer == 6, "norms, SiLU and the merge are parts of others"
    assert fewest.total == 6 * 32 + 5


def test_a_layer_of_experts_is_twelve_launches(checkpoint: Any) -> None:
    """Instead of two products and SiLU: the router, the routing, two products for all experts,
    their sum. A step of more than 32 tokens also counts the tokens before it lays them out."""
    config = json.loads((checkpoint("mixtral") / "config.json").read_text())
    config["num_hidden_layers"] = 8
    found = [step_launches.decode_step(config, batch, 600) for batch in (1, 32, 33)]
    assert [one.per_layer for one in found] == [12, 12, 13]
    assert found[0].launched["grouped_kernel"] == 2 * found[0].layers


@pytest.mark.parametrize("name", RECORDED)
def test_a_step_does_not_wait_for_the_host(name: str, checkpoint: Any) -> None:
    config = json.loads((checkpoint(name) / "config.json").read_text())
    found = step_launches.decode_step(config, 2, 100)
    assert found.total >= 9 * found.layers


def test_adapters_are_two_launches_for_each_linear_layer_and_do_not_wait_for_the_host() -> None:
    """Independent of the number of different adapters."""
    config = SHAPES["1b"].config()
    plain = step_launches.decode_step(config, 4, 64)
    for adapters in (1, 4):
        found = step_launches.decode_step(config, 4, 64, adapters)
        assert found.per_layer == plain.per_layer + 2 * 4
        assert found.total == plain.total + 2 * 4 * found.layers


def test_a_step_that_asks_the_host_is_found() -> None:
    ones = torch.ones(2, device="meta")
    for ask in (lambda: ones.new_tensor(3.0), lambda: ones.sum().item(), ones.tolist):
        with step_launches.HostCalls(), pytest.raises(RuntimeError, match="needs the host"):
            ask()
