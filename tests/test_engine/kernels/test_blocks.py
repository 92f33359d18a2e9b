"""Products with matrices in the block types of GGUF files, for every instruction set that this CPU
runs, against the library gguf, which dequantises them."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from headrace_engine.checkpoints.gguf_tensors import BLOCKS
from headrace_engine.kernels.cpu import library
from headrace_engine.kernels.cpu.blocks import KINDS
from headrace_engine.kernels.cpu.executor import Executor
from headrace_engine.layers.gguf_weight import GGUFWeight
from headrace_testing.cpu_levels import chosen_sets

INPUTS, OUTPUTS = 768, 150
# Where a block has its float16 numbers.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
# Instruction sets on which rows in bfloat16 are rounded to 8 bits.
ROUNDING = ("avx2", "avx512", "avx512_bf16")


@pytest.fixture(params=chosen_sets())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def executor(isa: str) -> Executor:
    return Executor(library.load(isa), 2)


def drawn(kind: str, outputs: int = OUTPUTS, inputs: int = INPUTS, seed: int = 0) -> GGUFWeight:
    """Blocks of random bytes with scales of both signs, one of them 0 and one subnormal."""
    rng = np.random.default_rng(seed)
    block, size = BLOCKS[kind]
    found = rng.integers(0, 256, (outputs, inputs // block, size), dtype=np.uint8)
    scales = rng.normal(size=(outputs, inputs // block, 1), scale=0.01).astype(np.float16)
    scales[0, 0], scales[1, 0] = 0, 1e-6
    for at in HALVES.get(kind, (0,)):
        found[..., at : at + 2] = scales.view(np.uint8)
    return GGUFWeight(torch.from_numpy(found.reshape(outputs, -1)), kind, inputs)


def values(weight: GGUFWeight) -> torch.Tensor:
    kind = GGMLQuantizationType[weight.kind]
    return torch.from_numpy(dequantize(weight.blocks.numpy(), kind))


def exact_rows(count: int, inputs: int = INPUTS) -> torch.Tensor:
    """Rows that have no error in 8 bits, nor in bfloat16."""
    x = torch.randint(-127, 128, (count, inputs), generator=torch.Generator().manual_seed(1))
    x[:, ::64] = 127  # the scale of each group of 64 inputs is 1
    return x.float()


@pytest.mark.parametrize("kind", KINDS)
def test_in_float32_values_are_exact(kind: str, executor: Executor) -> None:
    """Bit for bit the product of a matrix that was dequantised before."""
    weight, x = drawn(kind), torch.randn(9, INPUTS, generator=torch.Generator().manual_seed(0))
    packed = executor.pack_blocks([weight], [], False, torch.float32)
    whole = executor.pack([values(weight)], [], quantize=False)
    assert torch.equal(executor.linear(packed, x), executor.linear(whole, x))
    assert torch.equal(executor.unpack(packed, torch.float32), values(weight))


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_only_rows_are_rounded(kind: str, isa: str, executor: Executor) -> None:
    """Where rows are not rounded to 8 bits, weights are rounded to bfloat16."""
    weight, x = drawn(kind), exact_rows(9)
    packed = executor.pack_blocks([weight], [], False, torch.bfloat16)
    found = executor.linear(packed, x.bfloat16())
    if isa in ROUNDING:
        expected = x.double() @ values(weight).double().T
        atol = 1e-5 * float(expected.std())
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=atol)
    else:
        whole = executor.pack([values(weight).bfloat16()], [], quantize=False)
        assert torch.equal(found, executor.linear(whole, x.bfloat16()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_a_row_does_not_depend_on_others(kind: str, dtype: torch.dtype, executor: Executor) -> None:
    packed = executor.pack_blocks([drawn(kind)], [], False, dtype)
    x = torch.randn(230, INPUTS, generator=torch.Generator().manual_seed(2)).to(dtype)
    whole = executor.linear(packed, x)
    for rows in (slice(0, 1), slice(1, 3), slice(3, 8), slice(100, 230)):
        assert torch.equal(executor.linear(packed, x[rows]), whole[rows])


@pytest.mark.parametrize("inputs", [32, 96])
def test_rows_end_within_a_group_of_activations(inputs: int, executor: Executor) -> None:
    weight, x = drawn("Q5_0", inputs=inputs), exact_rows(5, inputs)
    packed = executor.pack_blocks([weight], [], False, torch.bfloat16)
    expected = x.double() @ values(weight).double().T
    found = executor.linear(packed, x.bfloat16()).double()
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_are_stacked(dtype: torch.dtype, executor: Executor) -> None:
    """A panel with rows of several types becomes floats; others keep their bits."""
    first, second = drawn("Q4_K"), drawn("Q6_K", seed=1)
    floats = torch.randn(64, INPUTS, generator=torch.Generator().manual_seed(3)).to(dtype)
    bias = torch.randn(2 * OUTPUTS + 64, generator=torch.Generator().manual_seed(4))
    packed = executor.pack_blocks([first, second, floats], [bias], False, dtype)
    assert packed.panels is not None
    kinds = {panel.kind for panel in packed.panels}
    assert kinds == {0, KINDS["Q4_K"], KINDS["Q6_K"]}
    x = exact_rows(7)
    weights = torch.cat([values(first), values(second), floats.float()])
    found, expected = executor.linear(packed, x.to(dtype)), x @ weights.T + bias
    error = (found - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype is torch.float32 else 3e-3)


def test_gates_and_ups_alternate(executor: Executor) -> None:
    gate, up = drawn("Q4_K", outputs=70), drawn("Q4_K", outputs=70, seed=1)
    bias = torch.randn(140, generator=torch.Generator().manual_seed(4))
    packed = executor.pack_blocks([gate, up], [bias[:70], bias[70:]], True, torch.float32)
    x, half = exact_rows(3), executor.padded(1) // 2
    found = executor.linear(packed, x).view(3, -1, 2, half).transpose(1, 2).flatten(2)
    expected = x @ torch.cat([values(gate), values(up)]).T + bias
    torch.testing.assert_close(found[..., :70].flatten(1), expected, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_panels_take_the_memory_of_the_blocks(kind: str, executor: Executor) -> None:
    """K-quants have scales of 6 bits in the file, and of 8 in memory."""
    weight = drawn(kind, outputs=128)
    packed = executor.pack_blocks([weight], [], False, torch.bfloat16)
    assert packed.weight.numel() <= 1.03 * weight.blocks.numel()
