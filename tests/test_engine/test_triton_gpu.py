"""The Triton backend on a GPU with the shapes that models have, against the reference in float32,
and captured in a CUDA graph. Needs a CUDA device: `pytest -m gpu -rs`.
"""

import pytest
import torch

from headrace_engine.attention.base import AttentionBackend, LayerParams
from headrace_engine.attention.reference import ReferenceBackend
from headrace_engine.attention.triton import TritonBackend
from headrace_testing.attention_scenes import Case, Scene

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

RUNS = ((1023, 1), (0, 1), (5000, 1), (255, 1), (256, 1), (700, 300), (0, 513), (31, 2))
SHAPES = {
    "Llama 8B": Case(RUNS, 32, 8, 128, 16, LayerParams(128**-0.5)),
    "Llama 1B": Case(RUNS, 32, 8, 64, 16, LayerParams(64**-0.5)),
    "Qwen 7B": Case(RUNS, 28, 4, 128, 32, LayerParams(128**-0.5)),
    "Gemma 2": Case(RUNS, 8, 4, 256, 16, LayerParams(256**-0.5, 50.0, 512)),
    "Phi 2": Case(RUNS, 32, 32, 80, 16, LayerParams(80**-0.5)),
    "head of 192": Case(RUNS, 16, 2, 192, 128, LayerParams(192**-0.5)),
}
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def output(case: Case, backend: AttentionBackend, dtype: torch.dtype) -> torch.Tensor:
    blocks = sum(-(-sum(run) // case.block_size) for run in case.runs)
    scene = Scene(case, backend, dtype, torch.device("cuda"), blocks)
    starts, ends = [run[0] for run in case.runs], [sum(run) for run in case.runs]
    return scene.forward(list(range(len(starts))), starts, ends)[0]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", SHAPES)
def test_models_shapes(name: str, dtype: torch.dtype) -> None:
    found = output(SHAPES[name], TritonBackend(), dtype)
    expected = output(SHAPES[name], ReferenceBackend(), dtype)
    torch.testing.assert_close(found, expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


def test_a_captured_step_gives_the_same_bits() -> None:
    backend, case = TritonBackend(), SHAPES["Llama 8B"]
    device = torch.device("cuda")
    blocks = sum(-(-sum(run) // case.block_size) for run in case.runs)
    scene = Scene(case, backend, torch.bfloat16, device, blocks)
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
