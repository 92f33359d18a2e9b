"""Adapters by Triton's products, through the interpreter: the numbers equal the dense computation,
and decode steps with adapters are recorded, with a stand-in that runs a step again instead of
replaying a graph.
"""

from typing import Any

import numpy as np
import pytest
import torch

from headrace_engine import attention
from headrace_engine.cuda_graphs import cuda_graphs
from headrace_engine.cuda_graphs.cuda_graphs import CaptureSizes, DecodeRecorder, measure_graphs
from headrace_engine.cuda_graphs.static_batch import StaticBatch
from headrace_engine.device.transfer import Transfer
from headrace_engine.lora.batch import LoRABatch, LoRALimits, LoRAProducts, RowSlots
from headrace_engine.lora.linear import LoRALinear
from headrace_engine.lora.modules import Factors
from headrace_engine.lora.shapes import linear_shape
from headrace_engine.lora.tiles import TiledProducts, TiledRows
from headrace_engine.model_loader import loader
from headrace_engine.models import native
from headrace_engine.operators.batch_invariant import BatchInvariantOps
from headrace_engine.operators.triton import TritonOps
from headrace_testing.adapter_scenes import AdapterScene
from headrace_testing.recorded_steps import PaddedReference, Replays
from headrace_testing.tiled_lora import TiledOps, emulate_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
INPUTS, WIDTHS = 80, {"q": 40, "k": 24, "v": 150}
# Ranks by module: all modules, modules with different ranks, and one module.
SLOTS = ({"q": 12, "k": 5, "v": 1}, {"q": 2, "v": 12}, {"k": 7})
TRITON = TritonOps()
EVERY_DTYPE = pytest.mark.parametrize("dtype", BOUNDS)


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Layer:
    """A layer with three adapters in its slots, each of which replaced another one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        shape = linear_shape(INPUTS, WIDTHS, "attn")
        self.linear = LoRALinear(shape, len(SLOTS), 12, dtype, DEVICE)
        self.deltas: list[torch.Tensor] = []
        for turn in range(2):
            self.deltas = [self._put(slot, turn) for slot in range(len(SLOTS))]

    def _put(self, slot: int, turn: int) -> torch.Tensor:
        """Stores an adapter in a slot; returns its product B A, [out, in] in float64."""
        delta, parts = torch.zeros(sum(WIDTHS.values()), INPUTS).double(), {}
        for name, rank in SLOTS[(slot + turn + 1) % len(SLOTS)].items():
            columns = self.linear.shape.parts[f"attn.{name}"]
            down = random(rank, INPUTS, dtype=self.dtype, seed=rank)
            up = random(rank, columns.width, dtype=self.dtype, seed=rank + 50) / 4
            parts[f"attn.{name}"] = Factors(down, up)
            rows = slice(columns.start, columns.start + columns.width)
            delta[rows] = (up.double().T @ down.double()).cpu()
        self.linear.put(slot, parts)
        return delta.to(DEVICE)

    def exact(self, slots: RowSlots, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = y.double()
        for row, slot in enumerate(slots):
            if slot >= 0:
                made[row] += self.deltas[slot] @ x[row].double()
        return made


def products(dtype: torch.dtype, ops: TritonOps = TRITON) -> LoRAProducts:
    limits = LoRALimits(len(SLOTS), 40, dtype.itemsize)
    return ops.lora_products(limits, Transfer(DEVICE))


def inputs(count: int, dtype: torch.dtype) -> tuple[RowSlots, torch.Tensor, torch.Tensor]:
    slots = np.random.default_rng(count).integers(-1, len(SLOTS), count)
    x = random(count, INPUTS, dtype=dtype, seed=1) / 9
    return slots, x, random(count, sum(WIDTHS.values()), dtype=dtype, seed=2)


@EVERY_DTYPE
@pytest.mark.parametrize("count", [1, 40, 270])
def test_each_row_gets_the_product_of_its_adapter(dtype: torch.dtype, count: int) -> None:
    """The rows have different ranks and modules; there are more rows than in a tile, and some have
    no adapter."""
    layer, (slots, x, y) = Layer(dtype), inputs(count, dtype)
    expected, before = layer.exact(slots, x, y), y.clone()
    products(dtype).rows(slots).add(layer.linear, x, y)
    torch.testing.assert_close(y.double(), expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    assert torch.equal(y[slots < 0], before[slots < 0])
    products(dtype).rows(np.full(count, -1)).add(layer.linear, x, before)
    assert torch.equal(before, inputs(count, dtype)[2])


@EVERY_DTYPE
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    """Alone, with few others and with many."""
    layer, (slots, x, y) = Layer(dtype), inputs(270, dtype)

    def made(rows: slice) -> torch.Tensor:
        result = y[rows].clone()
        adapted = products(dtype, BatchInvariantOps()).rows(slots[rows])
        adapted.add(layer.linear, x[rows], result)
        return result

    found = made(slice(0, 270))
    for rows in (slice(0, 1), slice(7, 8), slice(100, 135)):
        assert torch.equal(made(rows), found[rows])


def test_a_recorded_step_reads_the_current_rows() -> None:
    """Steps of all sizes share one buffer: a smaller step leaves nothing of the one before, and an
    adapter that is loaded into a slot is used at once."""
    made, layer = products(torch.float32), Layer(torch.float32)
    static = made.static([{"o": layer.linear}], DEVICE)
    assert static is not None
    recorded = {size: static.view(size).tokens for size in (40, 8)}
    for count, size in ((40, 40), (30, 40), (5, 8), (1, 40)):
        slots, x, y = inputs(count, torch.float32)
        padded = torch.cat([x, x.new_full((size - count, INPUTS), 7.0)])
        result = torch.cat([y, y.new_zeros(size - count, y.shape[1])])
        rows = made.rows(slots)
        static.fill(LoRABatch([], rows, rows), size)
        recorded[size].add(layer.linear, padded, result)
        expected = layer.exact(slots, x, y)
        torch.testing.assert_close(result[:count].double(), expected, rtol=1e-5, atol=1e-5)
        assert result[count:].eq(0).all()
        layer.linear.put(count % len(SLOTS), {})
        layer.deltas[count % len(SLOTS)].zero_()


@pytest.mark.parametrize("slots", [1, 3])
def test_no_step_has_more_tiles_than_its_recording(slots: int) -> None:
    made = TiledProducts(LoRALimits(slots, 40, 4), Transfer(DEVICE))
    for count in range(1, 41):
        worst = max(
            made.rows(np.repeat(range(slots), [count - spread, *[spread // 2] * 2][:slots])).tiles
            for spread in range(0, count, 2)
        )
        assert worst <= made.most_tiles(count) <= made.most_tiles(40)


# Whole models


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    """Emulates graphs of 2 and 4 rows; steps with more rows are launched."""
    made = Replays()
    monkeypatch.setattr(attention, "select", lambda *_: PaddedReference())
    monkeypatch.setattr(loader, "TorchOps", TiledOps)
    emulate_kernels(monkeypatch)
    monkeypatch.setattr(DecodeRecorder, "refusal", lambda _: None)
    monkeypatch.setattr(cuda_graphs, "CudaCapture", lambda: made)
    monkeypatch.setattr(CaptureSizes, "up_to", lambda *_: CaptureSizes((2, 4), (256,)))
    return made


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"async_scheduling": False, "max_num_batched_tokens": 7},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=["async", "chunked", "ngram"],
)
def test_steps_with_adapters_are_replayed_and_give_the_tokens_of_merged_weights(
    adapter_scene: AdapterScene, replays: Replays, options: dict[str, Any]
) -> None:
    """Two slots for three adapters: the weights that a recording reads change between replays."""
    llm = adapter_scene.llm(attention_backend="auto", max_num_seqs=5, **options)
    assert len(replays.recorded) == 2 * 2, "with adapters and without"
    adapter_scene.run(llm, ["all", "some"], count=1)
    alone = len(replays.used)
    assert alone > 2
    adapter_scene.run(llm, ["one", None, "all", "some"])
    for name in ("all", "one", "some"):
        adapter_scene.run(llm, [None, name], count=1)
    assert len(replays.used) > 3 * alone


@pytest.mark.parametrize("deterministic", [False, True])
def test_adapters_without_recorded_steps_give_the_same_tokens(
    adapter_scene: AdapterScene, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """Holds if the other layers are deterministic, as on a GPU."""
    monkeypatch.setattr(loader, "TorchOps", TiledOps)
    monkeypatch.setattr(native, "check_deterministic", lambda *_: None)
    emulate_kernels(monkeypatch)
    monkeypatch.setattr(attention, "select", lambda *_: PaddedReference())
    options = {"max_num_seqs": 5, "deterministic": deterministic}
    llm = adapter_scene.llm(attention_backend="auto", **options)
    adapter_scene.run(llm, ["one", None, "all", "some"], count=1)


def test_the_memory_of_recordings_of_both_kinds_is_kept_free(
    adapter_scene: AdapterScene, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = adapter_scene.llm(attention_backend="auto", max_num_seqs=4)
    left, runner = iter((1000, 900, 895, 887, 884)), llm.llm_engine.model.runner
    assert runner._lora is not None
    monkeypatch.setattr(cuda_graphs, "free_bytes", lambda _: next(left))
    model, caches, static = runner._placed.model, runner._caches, runner._lora.static
    found = measure_graphs(
        DecodeRecorder(model, runner.attention, caches, llm.llm_engine.model.config, 256, static)
    )
    blocks = 256 // llm.llm_engine.model.config.block_size
    assert found == StaticBatch(4, blocks, runner.device).num_bytes + 100 + 3 * 8


def test_the_largest_step_is_measured_with_adapters_in_all_rows(
    adapter_scene: AdapterScene, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, steps = TiledProducts.rows, []

    def rows(products: TiledProducts, slots: RowSlots) -> TiledRows:
        steps.append((len(slots), slots.min()))
        return make(products, slots)

    monkeypatch.setattr(TiledProducts, "rows", rows)
    monkeypatch.setattr(cuda_graphs, "free_bytes", lambda _: 0)
    options = {"num_blocks": None, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    adapter_scene.llm(attention_backend="auto", **options)
    assert steps[0] == (32, 0)
