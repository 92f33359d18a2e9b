"""Products of few rows through Triton's interpreter, against float64: rows and outputs that fill no
tile, split inputs, the activation of a gated MLP. Also split keys, whose results the last program
joins.
"""

from dataclasses import replace

import pytest
import torch

from headrace_engine.attention.triton import TritonBackend
from headrace_engine.core.attention_backend import LayerParams
from headrace_engine.kernels.triton.dependent_launch import StepLaunch
from headrace_engine.kernels.triton.launch import (
    ROW_BOUNDS,
    AttentionLaunches,
    DecodeLaunch,
    Launch,
    SmallBatchLaunch,
    VectorLaunch,
    silu_candidates,
    small_batch_candidates,
    vector_candidates,
)
from headrace_engine.operators.triton import TritonOps
from headrace_engine.operators.tuned_linear import TunedLinear
from headrace_testing.attention_scenes import Case, Scene
from headrace_testing.triton_interpreter import nearly_cancel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOUNDS = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
TILE = Launch(16, 16, 4, 2)
WHOLE = SmallBatchLaunch(32, 32, 1, 4, 3)


def random(*shape: int, dtype: torch.dtype, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def layer(dtype: torch.dtype, outputs: int = 90, bias: bool = False) -> TunedLinear:
    weight = random(outputs, 128, dtype=dtype, seed=4)
    added = random(outputs, dtype=dtype, seed=5) if bias else None
    made = TritonOps().linear(weight, added)
    assert isinstance(made, TunedLinear)
    return made


@pytest.mark.parametrize(
    ("dtype", "splits", "bias"),
    [(torch.bfloat16, 1, True), (torch.bfloat16, 2, False), (torch.float16, 4, True)],
)
def test_a_product_of_few_rows(dtype: torch.dtype, splits: int, bias: bool) -> None:
    linear = layer(dtype, bias=bias)
    for rows in (1, 17):
        x = random(rows, 128, dtype=dtype)
        found = linear.small_batch(x, replace(WHOLE, splits=splits))
        bound = BOUNDS[dtype]
        torch.testing.assert_close(found, linear.dense(x), rtol=bound, atol=8 * bound)
        # The counters of parts are reset.
        assert torch.equal(linear.small_batch(x, replace(WHOLE, splits=splits)), found)


@pytest.mark.parametrize(("dtype", "bias"), [(torch.bfloat16, True), (torch.float16, False)])
def test_a_product_of_one_row_without_tensor_cores(dtype: torch.dtype, bias: bool) -> None:
    linear, x, bound = layer(dtype, bias=bias), random(1, 128, dtype=dtype), BOUNDS[dtype]
    for launch in (VectorLaunch(8, 128, 4), VectorLaunch(4, 32, 2)):
        found = linear.small_batch(x, launch)
        torch.testing.assert_close(found, linear.dense(x), rtol=bound, atol=8 * bound)


@pytest.mark.parametrize(("dtype", "bias"), [(torch.bfloat16, True), (torch.float16, False)])
def test_gate_and_up_with_their_activation(dtype: torch.dtype, bias: bool) -> None:
    linear = layer(dtype, outputs=2 * 45, bias=bias)
    x = 8 * random(3, 128, dtype=dtype)
    nearly_cancel(x, linear._weight)
    apart = TritonOps().silu_mul(linear.small_batch(x, WHOLE))
    assert torch.equal(linear.small_batch_silu(x, WHOLE), apart)
    bound = BOUNDS[dtype]
    torch.testing.assert_close(linear.activated(x), apart, rtol=bound, atol=64 * bound)


def test_rows_that_are_not_adjacent_and_no_rows() -> None:
    linear, dtype = layer(torch.float16), torch.float16
    wide = random(6, 2, 256, dtype=dtype)[..., :128]
    found = linear.small_batch(wide, WHOLE)
    assert found.shape == (6, 2, 90)
    torch.testing.assert_close(found, linear.dense(wide), rtol=2e-3, atol=2e-2)
    assert linear.small_batch(wide[:0], WHOLE).shape == (0, 2, 90)


def test_a_chosen_launch_is_used_for_its_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, used = TritonOps(), []
    weight = random(90, 128, dtype=torch.float16, seed=4)
    linear = ops.linear(weight, None)
    assert isinstance(linear, TunedLinear)
    (tuned,) = ops.products.shapes.values()
    tuned.chosen[ROW_BOUNDS.index(16)] = WHOLE
    tuned.own[ROW_BOUNDS.index(8)] = WHOLE
    tuned.silu[ROW_BOUNDS.index(1)] = WHOLE
    monkeypatch.setattr(TunedLinear, "small_batch", lambda _, x, __: used.append(len(x)))
    monkeypatch.setattr(TunedLinear, "small_batch_silu", lambda _, x, __: used.append(-len(x)))
    for rows in (1, 8, 9, 16, 17, 64, 65):
        linear(random(rows, 128, dtype=torch.float16))
    linear.activated(random(1, 128, dtype=torch.float16))
    linear(random(9, 128, dtype=torch.float32).to(torch.float64).half()[:0])
    assert used == [9, 16, -1]
    used.clear()
    with ops.dependent_launches.during(StepLaunch(own_products=True)):
        for rows in (1, 8, 9, 17):
            linear(random(rows, 128, dtype=torch.float16))
    assert used == [8, 9], "cuBLAS multiplies if no own kernel was measured"


def test_candidates_fill_the_device_and_take_the_inputs_whole() -> None:
    for inputs, outputs in ((4096, 6144), (4096, 4096), (14336, 4096), (4096, 128_256)):
        found = small_batch_candidates(inputs, outputs)
        assert 3 <= len(found) <= 14
        for one in found:
            programs = -(-outputs // one.columns) * one.splits
            assert programs >= 96 and (one.splits == 1 or programs <= 1024)
            assert inputs % (one.depth * one.splits) == 0
        assert all(
            inputs % one.depth == 0 for size in (1, 2) for one in vector_candidates(inputs, size)
        )
        assert vector_candidates(inputs, 1) and vector_candidates(inputs, 2)
    assert not small_batch_candidates(100, 4096) and not small_batch_candidates(128, 64)
    assert len(silu_candidates(4096, 14336)) == 2 and not silu_candidates(4096, 64)


def test_parts_joined_within_the_kernel_have_the_same_bits_as_parts_joined_separately() -> None:
    params = LayerParams(0.2, 5.0, 24)
    case = Case(((40, 1), (20, 1), (3, 1)), heads=4, kv_heads=1, params=params)
    outputs = []
    for merges in (False, True):
        backend = TritonBackend((9, 0))
        backend.use(AttentionLaunches(decodes=((64, DecodeLaunch(TILE, 16, merges)),)))
        scene = Scene(case, backend, torch.float32, DEVICE)
        found, exact = scene.step()
        torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)
        outputs.append(found)
        again, exact = scene.step()  # the counter of the parts is left as it was found
        torch.testing.assert_close(again.double(), exact, rtol=2e-5, atol=2e-5)
    assert torch.equal(*outputs)


def test_a_padded_sequence_gets_zeros_where_parts_are_joined_within() -> None:
    backend = TritonBackend((9, 0))
    backend.use(AttentionLaunches(decodes=((64, DecodeLaunch(TILE, 16, True)),)))
    case = Case(((40, 1), (20, 1)), params=LayerParams(0.2))
    scene = Scene(case, backend, torch.float32, DEVICE)
    metadata = scene.metadata([0, 1], [40, 20], [41, 21])
    metadata.seq_lens[1] = 0
    query = torch.ones(2, case.heads, case.dim, device=DEVICE)
    output = backend.attend(query, scene.cache, metadata, case.params)
    assert output[1].eq(0).all()
