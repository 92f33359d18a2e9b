"""The Triton backend on a GPU, in the shapes of real models: compared with the reference in
float32, and recorded in a CUDA graph. Also every kernel that an engine may choose at warm-up. Needs
a CUDA device: `pytest -m gpu -rs`.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from triton.runtime.errors import OutOfResources

from headrace_engine.attention.reference import ReferenceBackend
from headrace_engine.attention.triton import TritonBackend
from headrace_engine.autotune.autotuner import CudaTimer
from headrace_engine.kernels.triton.launch import (
    AttentionLaunches,
    silu_candidates,
    small_batch_candidates,
    vector_candidates,
)
from headrace_engine.operators.triton import TritonOps
from headrace_engine.operators.tuned_linear import FewRowsLaunch, TunedLinear
from headrace_testing.model_attention import BOUNDS, SHAPES, model_output, model_scene

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_real_models(name: str, dtype: torch.dtype) -> None:
    found = model_output(SHAPES[name], TritonBackend(), dtype, CUDA)
    expected = model_output(SHAPES[name], ReferenceBackend(), dtype, CUDA)
    torch.testing.assert_close(found, expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


def test_a_captured_step_gives_the_same_bits() -> None:
    backend, case = TritonBackend(), SHAPES["Llama 8B"]
    scene = model_scene(case, backend, torch.bfloat16, CUDA)
    starts, ends = [run[0] for run in case.runs], [sum(run) for run in case.runs]
    metadata = scene.metadata(list(range(len(starts))), starts, ends)
    tokens = int(metadata.query_start[-1])
    query, key, value = (scene.random(tokens, heads) for heads in (32, 8, 8))
    arguments = (query, key, value, scene.cache, metadata, case.params)
    eager = backend.forward(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backend.forward(*arguments)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (14336, 4096), (4096, 28672)])
def test_every_candidate_of_a_product(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """Results are correct and always have the same bits: parts are joined in a fixed order."""
    weight = (torch.randn(outputs, inputs, device=CUDA) * 0.02).to(dtype)
    linear = TritonOps().linear(weight, None)
    assert isinstance(linear, TunedLinear)
    for rows in (1, 7, 16, 33, 64):
        x = torch.randn(rows, inputs, device=CUDA).to(dtype)
        exact = x.float() @ weight.float().T
        products: list[FewRowsLaunch] = [*small_batch_candidates(inputs, outputs)]
        products += vector_candidates(inputs, 2) if rows == 1 else []
        runs = [partial(linear.small_batch, launch=one) for one in products]
        gated = [
            partial(linear.small_batch_silu, launch=one)
            for one in silu_candidates(inputs, outputs // 2)
        ]
        for compute in (*runs, *gated):
            try:
                found = compute(x)
            except OutOfResources:
                continue  # as the autotuner does on devices before Hopper
            gate, up = exact.chunk(2, dim=-1)
            expected = exact if compute in runs else torch.nn.functional.silu(gate) * up
            error = (found.float() - expected).norm() / expected.norm()
            assert error < 1e-2, (rows, compute)
            assert all(torch.equal(compute(x), found) for _ in range(5)), (rows, compute)


@pytest.mark.parametrize("name", SHAPES)
def test_parts_joined_within_the_kernel(name: str) -> None:
    """The results always have the same bits, and are close to those of parts that another kernel
    joins: it has other warps, so it adds in another order."""
    outputs, case = [], SHAPES[name]
    for merges in (True, True, True, False):
        backend = TritonBackend()
        table = backend.decode_launch(2, case.dim, 64)
        backend.use(AttentionLaunches(decodes=((64, replace(table, merges=merges)),)))
        outputs.append(model_output(case, backend, torch.bfloat16, CUDA))
    *within, apart = outputs
    assert all(torch.equal(within[0], one) for one in within)
    bound = BOUNDS[torch.bfloat16]
    torch.testing.assert_close(within[0], apart, rtol=bound, atol=bound)


def test_times_are_those_of_the_device() -> None:
    small, large = (torch.zeros(size, device=CUDA) for size in (1 << 20, 1 << 28))
    assert 0 < CudaTimer()(lambda: small + 1) < CudaTimer()(lambda: large + 1) < 1
