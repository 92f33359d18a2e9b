"""Deterministic operators for CUDA devices, through Triton's interpreter: linear layers and
attention whose bits for a row do not depend on the batch, and a whole model made of them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_common.sampling.params import SamplingParams
from headrace_engine import attention
from headrace_engine.attention.triton import TritonBackend
from headrace_engine.core.attention_backend import LayerParams
from headrace_engine.core.request import EngineRequest
from headrace_engine.engine.engine import Engine
from headrace_engine.model_loader import loader
from headrace_engine.models import native
from headrace_engine.operators.batch_invariant import BatchInvariantLinear, BatchInvariantOps
from headrace_testing.attention_scenes import CASES, Case, Scene
from headrace_testing.engines import Output, engine_config, make_runner, request, run

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HOPPER = (9, 0)
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2**-6}


def random(*shape: int, dtype: torch.dtype, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_of_a_linear_layer_has_the_same_bits_in_every_batch(
    dtype: torch.dtype, bias: bool
) -> None:
    x, weight = random(66, 90, dtype=dtype), random(67, 90, dtype=dtype, seed=4)
    added = random(67, dtype=dtype, seed=5) if bias else None
    layer = BatchInvariantLinear(weight, added)
    found = layer(x)
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if added is None else added.double()
    )
    torch.testing.assert_close(found.double(), expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    for first, last in ((0, 1), (65, 66), (3, 40)):
        assert torch.equal(layer(x[first:last]), found[first:last])
    assert layer(x[:0]).shape == (0, 67)
    assert layer(x[:6].view(2, 3, 90)).shape == (2, 3, 67)


@pytest.mark.parametrize("name", ["mixed", "window"])
def test_deterministic_attention_equals_the_dense_computation(name: str) -> None:
    backend = TritonBackend(HOPPER, deterministic=True)
    found, exact = Scene(CASES[name], backend, torch.float32, DEVICE).step()
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("params", [LayerParams(0.2), LayerParams(0.2, None, 20)])
def test_a_token_has_the_same_bits_in_a_chunk_and_as_a_decode(params: LayerParams) -> None:
    case = Case(((0, 70),), block_size=16, params=params)
    outputs = []
    for steps in ([(0, 70)], [(0, 37), (37, 69), (69, 70)]):
        scene = Scene(
            replace(case), TritonBackend(HOPPER, deterministic=True), torch.float32, DEVICE
        )
        parts = [scene.forward([0], [start], [end])[0] for start, end in steps]
        outputs.append(torch.cat(parts)[-1])
    assert torch.equal(*outputs)


def test_a_model_gives_the_same_bits_alone_and_in_a_batch(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step through Triton, as on a CUDA device."""
    folder: Path = checkpoint("qwen3")
    monkeypatch.setattr(attention, "select", lambda *_: TritonBackend(HOPPER, deterministic=True))
    monkeypatch.setattr(loader, "make_ops", lambda *_: BatchInvariantOps())
    monkeypatch.setattr(native, "check_deterministic", lambda *_: None)
    runner = make_runner(
        folder, attention_backend="auto", deterministic=True, num_blocks=32, block_size=16
    )
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2, logprobs=1)
    work = [request(str(size), range(3, 3 + size), params) for size in (6, 3)]

    def serve(*requests: EngineRequest) -> dict[tuple[str, int], Output]:
        config = engine_config(folder, block_size=16, enable_prefix_caching=False)
        return run(Engine(config, runner), requests)

    assert serve(*work)["3", 0] == serve(work[1])["3", 0]
