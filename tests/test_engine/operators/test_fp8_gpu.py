"""8-bit floats on a GPU in the shapes of real models: Triton's reads of a KV cache, compared with
the reference; products with weights, compared with those of the dequantised weights. Needs a CUDA
device: `pytest -m gpu -rs`.
"""

from dataclasses import replace

import pytest
import torch

from headrace_engine.attention.reference import ReferenceBackend
from headrace_engine.attention.triton import TritonBackend
from headrace_engine.core.attention_backend import LayerParams
from headrace_engine.kernels.triton.launch import AMPERE
from headrace_engine.layers.float8_linear import ScaledLinear, make_float8
from headrace_engine.layers.float8_weight import Float8Weight, round_rows, round_weight
from headrace_engine.layers.fp8_cache import ADA, E4M3, E5M2
from headrace_engine.operators.tuned_float8 import Float8Linear, Float8Products
from headrace_engine.operators.tuned_linear import FewRowsLaunch
from headrace_testing.attention_scenes import Scene
from headrace_testing.model_attention import SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda")


@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("bits", [False, True], ids=["by instructions", "by bits"])
def test_caches_of_8_bit_floats(cache_dtype: torch.dtype, bits: bool) -> None:
    """Both read the same numbers, so they differ only by the rounding of bfloat16."""
    if not bits and torch.cuda.get_device_capability() < ADA:
        pytest.skip("no CUDA device from Ada on")
    params = LayerParams(128**-0.5, key_scale=0.25, value_scale=0.5)
    case = replace(SHAPES["Llama 8B"], params=params)
    starts, ends = [run[0] for run in case.runs], [sum(run) for run in case.runs]
    blocks = sum(-(-end // case.block_size) for end in ends)
    found, expected = (
        Scene(case, backend, torch.bfloat16, CUDA, blocks, cache_dtype).forward(
            list(range(len(ends))), starts, ends
        )[0]
        for backend in (TritonBackend(AMPERE if bits else None), ReferenceBackend())
    )
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("tokens", [1, 33, 700])
@pytest.mark.parametrize("group", [4096, 128])
@pytest.mark.parametrize("capability", [None, AMPERE], ids=["own", "as Ampere"])
def test_products_with_weights_of_8_bit_floats(
    tokens: int, group: int, capability: tuple[int, int] | None
) -> None:
    generator = torch.Generator(CUDA).manual_seed(1)
    x = torch.randn(tokens, 4096, generator=generator, device=CUDA).bfloat16()
    weight = round_weight(torch.randn(6144, 4096, generator=generator, device=CUDA) * 0.02)
    if group < 4096:
        scales = torch.rand(6144, 4096 // group, generator=generator, device=CUDA) + 0.5
        weight = Float8Weight(weight.values, scales * 1e-4, group)
    layer = make_float8(weight, None, CUDA, capability)
    assert layer is not None
    rows = x.float()
    if isinstance(layer, ScaledLinear):
        values, row_scales = round_rows(x)
        rows = values.float() * row_scales
    # Outputs of 4096 products, near 1.3: bfloat16's rounding, and another order of the sums.
    torch.testing.assert_close(layer(x).float(), rows @ weight.dequantize().T, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("tokens", [1, 17, 64])
@pytest.mark.parametrize("group", [4096, 128])
@pytest.mark.parametrize("capability", [(9, 0), (8, 0)], ids=["own", "as Ampere"])
def test_few_rows_with_every_launch(tokens: int, group: int, capability: tuple[int, int]) -> None:
    generator = torch.Generator(CUDA).manual_seed(1)
    x = torch.randn(tokens, 4096, generator=generator, device=CUDA).bfloat16()
    weight = round_weight(torch.randn(6144, 4096, generator=generator, device=CUDA) * 0.02)
    if group < 4096:
        scales = torch.rand(6144, 4096 // group, generator=generator, device=CUDA) + 0.5
        weight = Float8Weight(weight.values, scales * 1e-4, group)
    products = Float8Products()
    layer = products.layer(weight, None, CUDA, capability)
    assert isinstance(layer, Float8Linear)
    ((shape, _),) = products.shapes.items()
    expected = x.float() @ weight.dequantize().T
    launches: list[FewRowsLaunch] = [*shape.candidates]
    launches += shape.vector_candidates if tokens == 1 else []
    for launch in launches:
        found = layer.small_batch(x, launch)
        torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=2e-2)
        assert all(torch.equal(layer.small_batch(x, launch), found) for _ in range(5)), launch
