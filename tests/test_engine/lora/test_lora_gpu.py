"""Adapters on a GPU in the shapes of real models: compared with the dense computation in float32,
and recorded in a CUDA graph. Needs a CUDA device: `pytest -m gpu -rs`.
"""

from typing import Any

import numpy as np
import pytest
import torch

from headrace_engine.device.transfer import Transfer
from headrace_engine.lora.batch import LoRABatch, LoRALimits
from headrace_engine.lora.linear import LoRALinear
from headrace_engine.lora.modules import Factors
from headrace_engine.lora.shapes import linear_shape
from headrace_engine.lora.tiles import TiledProducts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda")
SLOTS, STEPS = 4, 256
# The sizes of Llama 8B.
SHAPES = {
    "qkv": (4096, {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024}),
    "o": (4096, {"o_proj": 4096}),
    "gate_up": (4096, {"gate_proj": 14336, "up_proj": 14336}),
    "down": (14336, {"down_proj": 4096}),
}


class Layer:
    """A layer in which each slot's adapter has another rank."""

    def __init__(self, name: str, max_rank: int, deterministic: bool = False) -> None:
        inputs, widths = SHAPES[name]
        shape = linear_shape(inputs, widths, "block")
        self.linear = LoRALinear(shape, SLOTS, max_rank, torch.bfloat16, CUDA)
        limits = LoRALimits(SLOTS, STEPS, 2)
        self.products = TiledProducts(limits, Transfer(CUDA), deterministic)
        self.deltas = [self.put(slot, max_rank >> slot, seed=slot) for slot in range(SLOTS)]

    def put(self, slot: int, rank: int, seed: int) -> torch.Tensor:
        """Stores an adapter in a slot; returns its product B A in float32."""
        generator = torch.Generator().manual_seed(seed)
        shape = self.linear.shape
        delta = torch.zeros(shape.outputs, shape.inputs, device=CUDA)
        parts = {}
        for name, columns in shape.parts.items():
            down = torch.randn(rank, shape.inputs, generator=generator) * shape.inputs**-0.5
            up = torch.randn(rank, columns.width, generator=generator) * rank**-0.5
            parts[name] = Factors(down.bfloat16(), up.bfloat16())
            rows = slice(columns.start, columns.start + columns.width)
            matrices = (up.bfloat16().float().to(CUDA), down.bfloat16().float().to(CUDA))
            delta[rows] = matrices[0].T @ matrices[1]
        self.linear.put(slot, parts)
        return delta

    def inputs(self, count: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        slots = np.random.default_rng(count).integers(-1, SLOTS, count)
        x = torch.randn(count, self.linear.shape.inputs, device=CUDA).bfloat16()
        return slots, x, torch.zeros(count, self.linear.shape.outputs, device=CUDA).bfloat16()

    def exact(self, slots: Any, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(len(x), self.linear.shape.outputs, device=CUDA)
        for slot, delta in enumerate(self.deltas):
            rows = torch.from_numpy(np.flatnonzero(slots == slot)).to(CUDA)
            made[rows] = x[rows].float() @ delta.T
        return made


@pytest.mark.parametrize("count", [1, 64, 256, 2000])
@pytest.mark.parametrize("max_rank", [16, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_real_models(name: str, max_rank: int, count: int) -> None:
    layer = Layer(name, max_rank)
    slots, x, y = layer.inputs(count)
    layer.products.rows(slots).add(layer.linear, x, y)
    torch.testing.assert_close(y.float(), layer.exact(slots, x), rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("name", SHAPES)
def test_a_row_has_the_same_bits_in_every_batch(name: str) -> None:
    layer = Layer(name, 16, deterministic=True)
    slots, x, y = layer.inputs(1000)
    layer.products.rows(slots).add(layer.linear, x, y)
    for rows in (slice(0, 1), slice(500, 564), slice(3, 900)):
        alone = torch.zeros_like(y[rows])
        layer.products.rows(slots[rows]).add(layer.linear, x[rows], alone)
        assert torch.equal(alone, y[rows])


@pytest.mark.parametrize("name", SHAPES)
def test_a_recorded_graph_reads_the_current_rows_and_adapters(name: str) -> None:
    layer = Layer(name, 16)
    static = layer.products.static([{"o": layer.linear}], CUDA)
    recorded = static.view(64).tokens
    _, x, y = layer.inputs(64)
    recorded.add(layer.linear, x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded.add(layer.linear, x, y)
    for count in (64, 50, 1):
        slots, fresh, _ = layer.inputs(count)
        layer.deltas[count % SLOTS] = layer.put(count % SLOTS, 16, seed=100 + count)
        rows = layer.products.rows(slots)
        static.fill(LoRABatch([], rows, rows), 64)
        x[:count].copy_(fresh)
        y.zero_()
        graph.replay()
        expected = layer.exact(slots, fresh)
        torch.testing.assert_close(y[:count].float(), expected, rtol=2**-5, atol=2**-5)
        assert y[count:].eq(0).all()
