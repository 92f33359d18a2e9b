"""The Triton backend on a GPU with the shapes that models have, against the reference in float32,
and captured in a CUDA graph. Needs a CUDA device: `pytest -m gpu -rs`.
"""

import pytest
import torch

from headrace_engine.attention.reference import ReferenceBackend
from headrace_engine.attention.triton import TritonBackend
from headrace_testing.model_attention import BOUNDS, SHAPES, model_output, model_scene

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", SHAPES)
def test_models_shapes(name: str, dtype: torch.dtype) -> None:
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
