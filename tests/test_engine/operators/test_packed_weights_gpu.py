"""Weights in integers of 4 or 8 bits on a GPU, in the shapes of real models: products compared with
those of the dequantised weights, all possible launches, experts, and CUDA graphs. Needs a CUDA
device: `pytest -m gpu -rs`.
"""

from dataclasses import replace

import pytest
import torch

from headrace_engine.kernels.triton.launch import ROW_BOUNDS
from headrace_engine.kernels.triton.packed_launch import packed_candidates
from headrace_engine.layers.expert_weights import ExpertWeights, GroupedWeight, read_packed_weights
from headrace_engine.layers.packed_weights import pack_quantized
from headrace_engine.layers.quantized_weight import QuantizedWeight, round_weight
from headrace_engine.operators.batch_invariant import BatchInvariantLinear, BatchInvariantOps
from headrace_engine.operators.packed_linear import PackedProducts, PackedWeightLinear
from headrace_engine.operators.triton_experts import GroupedMoe
from headrace_testing.mixtures import Mixture, QuantizedMatrices, expert_names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda")
# (outputs, inputs) of layers of an 8B model, and an odd shape.
SHAPES = {"QKV": (6144, 4096), "down": (4096, 14336), "odd": (1000, 1056)}
BOUNDS = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}


def drawn(shape: tuple[int, int], bits: int, group: int, symmetric: bool) -> QuantizedWeight:
    generator, (outputs, inputs) = torch.Generator(CUDA).manual_seed(1), shape
    count = inputs // group if group and inputs % group == 0 else 1

    def numbers(columns: int) -> torch.Tensor:
        return torch.randint(0, 2**bits, (outputs, columns), generator=generator, device=CUDA)

    zeros = numbers(count).float()
    zeros = torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
    scales = (torch.rand(outputs, count, generator=generator, device=CUDA) + 0.5).half().float()
    return QuantizedWeight(numbers(inputs).to(torch.uint8), scales * 2**-bits, zeros, None, bits)


def rows(count: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(2)
    return torch.randn(count, inputs, generator=generator, device=CUDA).to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def layer(weight: QuantizedWeight, bias: torch.Tensor | None = None) -> PackedWeightLinear:
    return PackedProducts().layer(pack_quantized(weight, CUDA), bias)


@pytest.mark.parametrize(
    ("name", "dtype", "bits", "group", "symmetric"),
    [
        ("QKV", torch.bfloat16, 4, 128, True),
        ("down", torch.bfloat16, 4, 128, False),
        ("odd", torch.bfloat16, 4, 0, True),
        ("QKV", torch.bfloat16, 4, 32, False),
        ("QKV", torch.bfloat16, 8, 0, True),
        ("odd", torch.bfloat16, 8, 0, False),
        ("QKV", torch.float16, 4, 128, False),
        ("QKV", torch.float16, 8, 128, False),
        ("odd", torch.float32, 4, 0, False),
    ],
)
def test_shapes_of_real_models(
    name: str, dtype: torch.dtype, bits: int, group: int, symmetric: bool
) -> None:
    weight, bias = drawn(SHAPES[name], bits, group, symmetric), rows(1, SHAPES[name][0], dtype)[0]
    linear = layer(weight, bias)
    for count in (1, 33, 200, 700):
        x = rows(count, weight.shape[1], dtype)
        expected = x.double() @ weight.dequantize().double().T + bias.double()
        assert error(linear(x), expected) < BOUNDS[dtype], count


@pytest.mark.parametrize(("bits", "symmetric"), [(4, False), (8, True)])
def test_every_launch_that_may_be_chosen_computes_the_same(bits: int, symmetric: bool) -> None:
    weight = drawn((4096, 4096), bits, 128, symmetric)
    linear = layer(weight)
    for count in ROW_BOUNDS:
        x = rows(count, 4096)
        expected = x.double() @ weight.dequantize().double().T
        for launch in packed_candidates(count, 4096, linear.steps):
            found = linear.small_batch(x, launch)
            assert error(found, expected) < BOUNDS[torch.bfloat16], launch
            assert torch.equal(linear.small_batch(x, launch), found), launch


def test_inputs_in_another_order() -> None:
    weight = drawn((6144, 4096), 4, 128, symmetric=False)
    groups = torch.arange(4096, device=CUDA) // 128
    order = torch.randperm(4096, generator=torch.Generator(CUDA).manual_seed(3), device=CUDA)
    weight = replace(weight, groups=groups[order])
    x = rows(16, 4096)
    expected = x.double() @ weight.dequantize().double().T
    assert error(layer(weight)(x), expected) < BOUNDS[torch.bfloat16]


def test_a_recorded_product_serves_other_rows() -> None:
    linear = layer(drawn((4096, 4096), 4, 128, symmetric=True))
    steps = rows(12, 4096).view(3, 4, 4096).unbind()
    expected, x = [linear(step) for step in steps], steps[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = linear(x)
    for step, result in zip(steps, expected, strict=True):
        x.copy_(step)
        graph.replay()
        assert torch.equal(recorded, result)


def test_a_row_has_the_same_bits_in_every_batch_if_deterministic() -> None:
    weight = drawn((4096, 4096), 4, 128, symmetric=False)
    linear, x = BatchInvariantOps().quantized_linear(weight, None, CUDA), rows(700, 4096)
    whole = linear(x)
    for first, last in ((0, 1), (699, 700), (5, 38), (100, 400)):
        assert torch.equal(linear(x[first:last]), whole[first:last])


def test_weights_are_rounded_to_8_bits_on_their_device() -> None:
    whole = torch.randn(4096, 4096, device=CUDA)
    x = rows(8, 4096, torch.float16)
    assert error(layer(round_weight(whole))(x), x.double() @ whole.double().T) < 0.02


@pytest.mark.parametrize("tokens", [1, 2000])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, False), (8, True)])
def test_experts(bits: int, symmetric: bool, tokens: int) -> None:
    """Experts of Qwen3 30B-A3B's sizes; in deterministic mode a row's bits do not depend on the
    batch."""
    mixture = Mixture(16, 4, 2048, 768, dtype=torch.bfloat16)
    names, matrices = expert_names(16), QuantizedMatrices(mixture, bits, 128, symmetric, CUDA)
    weights = read_packed_weights(matrices, names, quantize=False)
    assert weights is not None
    exact = ExpertWeights(
        *(GroupedWeight(torch.stack([matrices.stack(one[k]) for one in names])) for k in (0, 1))
    )
    x = mixture.rows(tokens, CUDA)
    found = GroupedMoe(mixture.parts(CUDA, weights=weights))(x)
    expected = mixture.one_by_one(CUDA, weights=exact)(x.float())
    torch.testing.assert_close(found.float(), expected, rtol=3e-2, atol=3e-2)
    invariant = GroupedMoe(mixture.parts(CUDA, BatchInvariantLinear, weights), deterministic=True)
    assert torch.equal(invariant(x)[-1:], invariant(x[-1:]))
