"""Mixtures of experts on a GPU, in the shapes of real models: compared with experts computed one by
one, and recorded in a CUDA graph. Needs a CUDA device: `pytest -m gpu -rs`.
"""

import pytest
import torch

from headrace_engine.kernels.triton.launch import AMPERE
from headrace_engine.layers.expert_weights import ExpertWeights, read_experts
from headrace_engine.operators.batch_invariant import BatchInvariantLinear
from headrace_engine.operators.triton_experts import GroupedMoe
from headrace_testing.mixtures import Matrices, Mixture, expert_names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda")
SHAPES = {
    "Mixtral 8x7B": Mixture(8, 2, 4096, 14336, dtype=torch.bfloat16),
    "Qwen3 30B-A3B": Mixture(128, 8, 2048, 768, dtype=torch.bfloat16),
    "Qwen1.5 2.7B": Mixture(
        60, 4, 2048, 1408, shared=5632, renormalise=False, dtype=torch.bfloat16
    ),
    "small, float32": Mixture(16, 2, 512, 320),
}
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("tokens", [1, 33, 256, 5000])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_real_models(name: str, tokens: int) -> None:
    mixture = SHAPES[name]
    x, bound = mixture.rows(tokens, CUDA), BOUNDS[mixture.dtype]
    found = GroupedMoe(mixture.parts(CUDA))(x)
    torch.testing.assert_close(found, mixture.one_by_one(CUDA)(x), rtol=bound, atol=bound)


@pytest.mark.parametrize("tokens", [1, 33, 5000])
@pytest.mark.parametrize("name", ["Qwen3 30B-A3B", "Qwen1.5 2.7B"])
def test_whole_experts_of_several_ranks_add_up(name: str, tokens: int) -> None:
    mixture = SHAPES[name]
    x, bound, middle = mixture.rows(tokens, CUDA), BOUNDS[mixture.dtype], mixture.experts // 3
    parts = [(0, middle), (middle, mixture.experts)]
    found = sum(GroupedMoe(mixture.part(CUDA, *own))(x).float() for own in parts)
    expected = mixture.one_by_one(CUDA)(x).float()
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", ["Qwen3 30B-A3B", "Qwen1.5 2.7B"])
@pytest.mark.parametrize("tokens", [4, 64])
def test_a_cuda_graph_computes_rows_with_another_routing(name: str, tokens: int) -> None:
    mixture = SHAPES[name]
    moe, rows = (
        GroupedMoe(mixture.parts(CUDA, BatchInvariantLinear)),
        mixture.rows(3 * tokens, CUDA),
    )
    steps = rows.view(3, tokens, -1).unbind()
    x = steps[0].clone()
    expected = [moe(step) for step in steps]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = moe(x)
    for step, result in zip(steps, expected, strict=True):
        x.copy_(step)
        graph.replay()
        assert torch.equal(recorded, result)


@pytest.mark.parametrize("name", SHAPES)
def test_a_row_has_the_same_bits_in_every_deterministic_batch(name: str) -> None:
    mixture = SHAPES[name]
    moe = GroupedMoe(mixture.parts(CUDA, BatchInvariantLinear), deterministic=True)
    x = mixture.rows(700, CUDA)
    whole = moe(x)
    for first, last in ((0, 1), (699, 700), (5, 38), (100, 400)):
        assert torch.equal(moe(x[first:last]), whole[first:last])


@pytest.mark.parametrize("group", [2048, 128])
@pytest.mark.parametrize("capability", [None, AMPERE], ids=["own", "as Ampere"])
@pytest.mark.parametrize("tokens", [1, 200, 3000])
def test_float8_weights_match_their_dequantised_values(
    group: int, capability: tuple[int, int] | None, tokens: int
) -> None:
    mixture = Mixture(16, 4, 2048, 2048, dtype=torch.bfloat16)
    names, matrices = expert_names(16), Matrices(mixture, CUDA, group)
    weights, exact = (read_experts(matrices, names, float8) for float8 in (True, False))
    assert isinstance(weights, ExpertWeights) and isinstance(exact, ExpertWeights)
    x = mixture.rows(tokens, CUDA)
    found = GroupedMoe(mixture.parts(CUDA, weights=weights), capability=capability)(x)
    expected = mixture.one_by_one(CUDA, weights=exact)(x.float()).to(x.dtype)
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
