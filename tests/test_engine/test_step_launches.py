"""What a decode step launches on a GPU: few kernels, and nothing that waits for the host, which a
recording could not hold. Counted on tensors without memory.
"""

import json
from typing import Any

import pytest
import torch

import step_launches
from gpu_shapes import SHAPES

RECORDED = ("llama3-rope", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3-partial")


def test_a_layer_of_llama_is_ten_launches() -> None:
    """Four products, two norms with the residual's sum, and one each: rotation with the cache's
    writes, attention, the merge of its parts, SiLU."""
    found = step_launches.decode_step(SHAPES["8b"].config(), 1, 1024)
    assert found.per_layer == 10
    assert found.total == 10 * 32 + 5  # embedding, cos, sin, first norm, head
    assert step_launches.decode_step(SHAPES["1b"].config(), 1, 64).per_layer == 9  # in one part


@pytest.mark.parametrize("name", RECORDED)
def test_a_step_needs_nothing_of_the_host(name: str, checkpoint: Any) -> None:
    config = json.loads((checkpoint(name) / "config.json").read_text())
    assert step_launches.decode_step(config, 2, 100).per_layer >= 9


def test_a_step_that_asks_the_host_is_found() -> None:
    ones = torch.ones(2, device="meta")
    for ask in (lambda: ones.new_tensor(3.0), lambda: ones.sum().item(), ones.tolist):
        with step_launches.HostCalls(), pytest.raises(RuntimeError, match="needs the host"):
            ask()
