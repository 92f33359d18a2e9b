"""Products with packed int4 or int8 weights as on CUDA devices, through Triton's interpreter.

They are compared with the dequantised weights, over groups, zero points, sizes and parts. Also
tests the assembly that converts the weights, and whole models: of quantised checkpoints, and of
checkpoints that are rounded to 8 bits.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from headrace_common.sampling.params import SamplingParams
from headrace_engine import attention
from headrace_engine.attention.reference import ReferenceBackend
from headrace_engine.autotune.autotuner import Autotuner
from headrace_engine.autotune.packed import tune_packed
from headrace_engine.checkpoints.config import ClampedSwiGLU
from headrace_engine.core.errors import ConfigError
from headrace_engine.engine.engine import Engine
from headrace_engine.kernels.triton import packed_assembly
from headrace_engine.kernels.triton.launch import ROW_BOUNDS, SmallBatchLaunch
from headrace_engine.kernels.triton.packed_launch import (
    DEQUANTIZED_ROWS,
    packed_candidates,
    packed_linear_launch,
)
from headrace_engine.layers.expert_weights import ExpertWeights, GroupedWeight, read_packed_weights
from headrace_engine.layers.mxfp4_weight import DOUBLED
from headrace_engine.layers.packed_weights import (
    GroupedPackedWeight,
    PackedWeightStack,
    pack_quantized,
)
from headrace_engine.layers.quantized_weight import QuantizedWeight, round_weight
from headrace_engine.model_loader import loader
from headrace_engine.models.decoder.decoder import Decoder
from headrace_engine.operators import packed_linear
from headrace_engine.operators.batch_invariant import BatchInvariantLinear, BatchInvariantOps
from headrace_engine.operators.packed_linear import PackedProducts, PackedWeightLinear
from headrace_engine.operators.triton import TritonOps
from headrace_engine.operators.triton_experts import GroupedMoe
from headrace_testing.checkpoints import Reference
from headrace_testing.engines import engine_config, greedy, make_runner, request, run
from headrace_testing.mixtures import Matrices, Mixture, QuantizedMatrices, expert_names
from headrace_testing.ptx import evaluate
from headrace_testing.quantized import Format, awq, gptq, save_mxfp4, save_quantized

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TILE = SmallBatchLaunch(32, 0, 1, 4, 2)
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn(
    outputs: int, inputs: int, bits: int, count: int = 1, symmetric: bool = False
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(bits)
    values = torch.randint(0, 2**bits, (outputs, inputs), generator=generator).to(torch.uint8)
    zeros = torch.randint(0, 2**bits, (outputs, count), generator=generator).float()
    zeros = torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
    scales = (torch.rand(outputs, count, generator=generator) + 0.5).half().float() / 2**bits
    return QuantizedWeight(values, scales, zeros, None, bits)


def shuffled(weight: QuantizedWeight, groups: torch.Tensor) -> QuantizedWeight:
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(2))
    return replace(weight, groups=groups[order])


def layer(weight: QuantizedWeight, bias: torch.Tensor | None = None) -> PackedWeightLinear:
    return PackedProducts().layer(pack_quantized(weight, DEVICE), bias)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    exact = expected.cpu().double()
    return float((found.cpu().double() - exact).norm() / exact.norm())


# Runs of 64, 32 and 16 inputs; groups of one run, of several, of all inputs; sizes that need
# padding, also after the last group; groups in any order and of any size.
WEIGHTS: dict[str, Callable[[], QuantizedWeight]] = {
    "4 bits, symmetric": lambda: drawn(90, 512, 4, 4, symmetric=True),
    "4 bits, groups of 64": lambda: drawn(33, 512, 4, 8),
    "4 bits, groups of 32": lambda: drawn(33, 256, 4, 8),
    "4 bits, groups of 16": lambda: drawn(33, 128, 4, 8),
    "4 bits, one group": lambda: drawn(33, 256, 4),
    "4 bits, padding": lambda: drawn(33, 100, 4),
    "4 bits, few inputs": lambda: drawn(33, 40, 4, 5),
    "2 bits": lambda: drawn(33, 128, 2, 8),
    "8 bits": lambda: drawn(33, 256, 8, symmetric=True),
    "8 bits, groups": lambda: drawn(33, 256, 8, 2),
    "in any order": lambda: shuffled(drawn(33, 256, 4, 8), torch.arange(256) // 32),
    "of any size": lambda: shuffled(drawn(33, 256, 4, 3), torch.arange(256).sqrt().long() // 6),
    "the last is smaller": lambda: replace(drawn(33, 100, 4, 4), groups=torch.arange(100) // 32),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_products_use_the_dequantised_weights(name: str) -> None:
    weight = WEIGHTS[name]()
    linear, x = layer(weight), random(3, weight.shape[1])
    expected = x.double() @ weight.dequantize().double().T
    assert error(linear.small_batch(x.to(DEVICE), TILE), expected) < BOUNDS[torch.float32]
    whole = linear.unpacked(torch.float32).cpu()
    ordered = linear._ordered(x.to(DEVICE)).cpu()
    assert error(ordered @ whole.T, expected) < BOUNDS[torch.float32]


@pytest.mark.parametrize(
    ("dtype", "bits", "splits"),
    [(torch.float32, 4, 1), (torch.bfloat16, 4, 3), (torch.float16, 8, 2)],
)
def test_rows_parts_and_biases(dtype: torch.dtype, bits: int, splits: int) -> None:
    weight, bias = drawn(40, 384, bits, 6), random(40, seed=5).to(DEVICE, dtype)
    linear, launch = layer(weight, bias), replace(TILE, splits=splits)
    for rows in (1, 70):
        x = random(rows, 384).to(dtype)
        expected = x.double() @ weight.dequantize().double().T + bias.cpu().double()
        found = linear.small_batch(x.to(DEVICE), launch)
        assert error(found, expected) < BOUNDS[dtype]
        # The counters of parts are reset.
        assert torch.equal(linear.small_batch(x.to(DEVICE), launch), found)


def test_the_slices_of_two_ranks_give_the_whole_product() -> None:
    weight, x = drawn(40, 512, 4, 8), random(3, 512)
    expected = x.double() @ weight.dequantize().double().T
    above, below = (
        layer(weight.rows(start, start + 20)).small_batch(x.to(DEVICE), TILE) for start in (0, 20)
    )
    assert error(torch.cat([above, below], dim=1), expected) < BOUNDS[torch.float32]
    left, right = (
        layer(weight.columns(start, start + 256))(x[:, start : start + 256].to(DEVICE))
        for start in (0, 256)
    )
    assert error(left + right, expected) < BOUNDS[torch.float32]


def test_many_rows_no_rows_and_three_dimensions() -> None:
    weight = drawn(20, 64, 4, 2)
    linear, x = layer(weight), random(DEQUANTIZED_ROWS + 1, 64).to(DEVICE)
    expected = x.cpu().double() @ weight.dequantize().double().T
    assert error(linear(x), expected) < BOUNDS[torch.float32]
    assert linear(x[:0]).shape == (0, 20)
    assert error(linear(x[:6].view(2, 3, 64)).view(6, 20), expected[:6]) < BOUNDS[torch.float32]


class Recorder:
    """Replaces the kernel and records the arguments that decide the order of a row's sums."""

    def __init__(self) -> None:
        self.launched = set[tuple[int, ...]]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*_: Any, **named: Any) -> None:
            names = ("ROWS", "COLUMNS", "SPLIT", "num_warps", "num_stages")
            self.launched.add((grid[1], *(named[name] for name in names)))

        return launch


def test_one_launch_serves_all_numbers_of_rows_if_deterministic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tile of another size might add up in another order on a device."""
    linear = BatchInvariantOps().quantized_linear(drawn(40, 1024, 4, 8), None, DEVICE)
    monkeypatch.setattr(packed_linear, "packed_linear_kernel", recorder := Recorder())
    for rows in (1, 20, 64, 65, DEQUANTIZED_ROWS + 1):
        linear(torch.zeros(rows, 1024, dtype=torch.float16, device=DEVICE))
    assert len(recorder.launched) == 1


def test_a_row_has_the_same_bits_in_every_batch_if_deterministic() -> None:
    weight = drawn(40, 64, 4, 2)
    linear = BatchInvariantOps().quantized_linear(weight, None, DEVICE)
    x = random(DEQUANTIZED_ROWS + 9, 64).to(DEVICE, torch.float16)
    found = linear(x)
    for first, last in ((0, 1), (3, 40), (DEQUANTIZED_ROWS, DEQUANTIZED_ROWS + 9)):
        assert torch.equal(linear(x[first:last]), found[first:last])


def test_errors_of_rounding_to_8_bits_are_at_most_half_a_step() -> None:
    weight = random(30, 64) * torch.logspace(-9, 4, 30)[:, None]
    weight[7] = 0.0
    rounded = round_weight(weight)
    steps = weight.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((rounded.dequantize() - weight).abs() <= steps * 0.5001).all())
    packed = pack_quantized(rounded, DEVICE)
    assert (packed.bits, packed.group, packed.zeros, packed.zero) == (8, 0, None, 128)


def test_packed_weights_are_as_small_as_in_the_checkpoint() -> None:
    """4 bits, and 16 bits of a scale for each 128 inputs."""
    packed = pack_quantized(drawn(64, 1024, 4, 8, symmetric=True), DEVICE)
    assert packed.num_bytes == 64 * 1024 // 2 + 64 * 8 * 2 and packed.order is None


@pytest.mark.parametrize(
    ("code", "bits", "first", "base", "dtype"),
    [
        (packed_assembly.EARLY_BFLOAT16, 4, 0, -128, torch.bfloat16),
        (packed_assembly.LATE_BFLOAT16, 4, 8, -128, torch.bfloat16),
        (packed_assembly.EARLY_FLOAT16, 4, 0, -1024, torch.float16),
        (packed_assembly.LATE_FLOAT16, 4, 8, -1024, torch.float16),
        (packed_assembly.BYTES_BFLOAT16, 8, 0, 128, torch.bfloat16),
        (packed_assembly.BYTES_FLOAT16, 8, 0, -1024, torch.float16),
    ],
    ids=["early bf16", "late bf16", "early fp16", "late fp16", "bytes bf16", "bytes fp16"],
)
def test_the_assembly_widens_every_word(
    code: Any, bits: int, first: int, base: int, dtype: torch.dtype
) -> None:
    """The result is exact for any zero point and for both words of a register."""
    words = np.arange(2**16, dtype=np.uint16)
    pairs = np.ascontiguousarray(np.stack([words, words[::-1]], 1)).view(np.uint32)[:, 0]
    for zeros in ((0, 2**bits - 1), (2 ** (bits - 1), 5)):
        offsets = [
            torch.tensor([base - zero] * 2).to(dtype).view(torch.uint16).numpy().view(np.uint32)[0]
            for zero in zeros
        ]
        made = evaluate(code.value, 2, [pairs, *(np.full_like(pairs, one) for one in offsets)])
        for place, (register, zero) in enumerate(zip(made, zeros, strict=True)):
            found = torch.from_numpy(register.view(np.uint16).copy()).view(dtype)
            expected = (words >> (first + place * bits) & (2**bits - 1)).astype(np.float32) - zero
            pair = torch.from_numpy(np.stack([expected, expected[::-1]], 1).reshape(-1))
            assert torch.equal(found.float(), pair)


@pytest.mark.parametrize(
    ("code", "first", "dtype"),
    [
        (packed_assembly.FLOATS_EARLY_BFLOAT16, 0, torch.bfloat16),
        (packed_assembly.FLOATS_LATE_BFLOAT16, 8, torch.bfloat16),
        (packed_assembly.FLOATS_EARLY_FLOAT16, 0, torch.float16),
        (packed_assembly.FLOATS_LATE_FLOAT16, 8, torch.float16),
    ],
    ids=["early bf16", "late bf16", "early fp16", "late fp16"],
)
def test_the_assembly_widens_every_4_bit_float(code: Any, first: int, dtype: torch.dtype) -> None:
    words = np.arange(2**16, dtype=np.uint16)
    pairs = np.ascontiguousarray(np.stack([words, words[::-1]], 1)).view(np.uint32)[:, 0]
    nothing = np.zeros_like(pairs)
    positive = np.array(DOUBLED, np.float32) / 2
    numbers = np.concatenate([positive, -positive])
    for place, register in enumerate(evaluate(code.value, 2, [pairs, nothing, nothing])):
        found = torch.from_numpy(register.view(np.uint16).copy()).view(dtype)
        expected = numbers[words >> (first + 4 * place) & 15]
        pair = torch.from_numpy(np.stack([expected, expected[::-1]], 1).reshape(-1))
        assert torch.equal(found.float(), pair)


def test_launches_fill_the_device_and_the_chosen_launch_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for outputs, inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        for rows in ROW_BOUNDS:
            candidates = packed_candidates(rows, outputs, inputs // 256)
            assert candidates[0] == packed_linear_launch(2, rows, outputs, inputs // 256)
            assert 3 <= len(candidates) <= 12
            for one in candidates:
                assert 2 * one.splits <= inputs // 256
        assert -(-outputs // candidates[0].columns) * candidates[0].splits >= 160
    products, used = PackedProducts(), list[SmallBatchLaunch]()
    linear = products.layer(pack_quantized(drawn(20, 64, 4), DEVICE), None)
    (tuned,) = products.shapes.values()
    tuned.chosen[ROW_BOUNDS.index(16)] = TILE
    monkeypatch.setattr(PackedWeightLinear, "small_batch", lambda _, x, launch: used.append(launch))
    for rows in (8, 9, 16, 17):
        linear(random(rows, 64).half())
    assert [one == TILE for one in used] == [False, True, True, False]


# One token, more than a tile's rows for an expert; two groups and one; gates by GELU; biases.
@pytest.mark.parametrize(
    ("bits", "size", "symmetric", "tokens", "mixture"),
    [
        (4, 32, False, 17, Mixture(2, 2, 64, 64, gelu=True)),
        (8, 64, True, 1, Mixture(2, 2, 64, 64)),
        (8, 32, True, 3, Mixture(2, 2, 64, 64, swiglu=ClampedSwiGLU(1.702, 0.7))),
    ],
)
def test_experts_are_multiplied_together(
    bits: int, size: int, symmetric: bool, tokens: int, mixture: Mixture
) -> None:
    names, matrices = expert_names(2), QuantizedMatrices(mixture, bits, size, symmetric, DEVICE)
    weights = read_packed_weights(matrices, names, quantize=False)
    assert weights is not None and isinstance(weights.down, GroupedPackedWeight)
    assert (weights.down.zeros is None) == symmetric
    whole = (
        GroupedWeight(torch.stack([matrices.stack(one[part]) for one in names])) for part in (0, 1)
    )
    weights, exact = mixture.biased(weights), mixture.biased(ExpertWeights(*whole))
    x, parts = mixture.rows(tokens, DEVICE), mixture.parts(DEVICE, weights=weights)
    found = GroupedMoe(parts)(x)
    assert (
        error(found, mixture.one_by_one(DEVICE, weights=exact)(x).double()) < BOUNDS[torch.float32]
    )
    same = mixture.parts(DEVICE, BatchInvariantLinear, weights)
    invariant = GroupedMoe(same, deterministic=True)
    assert torch.equal(invariant(x)[-1:], invariant(x[-1:]))


def test_experts_with_groups_of_different_sizes_are_not_stacked() -> None:
    mixture = Mixture(2, 1, 64, 64)
    few, many = (QuantizedMatrices(mixture, 4, size, True, DEVICE) for size in (32, 64))
    (first, second) = expert_names(2)
    stack = PackedWeightStack(2)
    assert stack.take(pack_quantized(few.quantized(first[1]), DEVICE))
    assert not stack.take(pack_quantized(many.quantized(second[1]), DEVICE))
    assert read_packed_weights(Matrices(mixture, DEVICE), expert_names(2), quantize=False) is None


def test_the_tuner_measures_each_shape_once_and_its_choice_is_used() -> None:
    """Every choice computes the same result, even with inputs in another order."""
    products = PackedProducts()
    weights = [drawn(40, 256, 4, 2), shuffled(drawn(40, 256, 4, 8), torch.arange(256) // 32)]
    linears = [products.layer(pack_quantized(one, DEVICE), None) for one in (*weights, weights[0])]
    tuner = Autotuner(lambda run: float(run().numel() > 0))
    x = random(16, 256).half()
    before = [linear(x) for linear in linears]
    tune_packed(tuner, products, 16, torch.empty(0, dtype=torch.float16, device=DEVICE))
    assert [one.kernel for one in tuner.choices] == [
        "product 40x256, 4 bits by 128 in runs of 64, zero points, rows 16, float16",
        "product 40x256, 4 bits by 32 in runs of 32, zero points, rows 16, float16",
    ]
    assert tuner.choices[0].read_bytes == 2 * linears[0].weight_bytes
    for tuned in products.shapes.values():
        assert tuned.chosen[ROW_BOUNDS.index(16)] is not None
    for linear, expected in zip(linears, before, strict=True):
        assert torch.equal(linear(x), expected)


class NamedAttention(ReferenceBackend):
    """The reference backend under another name: with its own name, no kernels would be used."""

    name: ClassVar[str] = "named"


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "select", lambda *_: NamedAttention())
    monkeypatch.setattr(loader, "make_ops", lambda *_: TritonOps())


MODELS: dict[str, tuple[str, Format]] = {
    "gptq": ("llama", gptq(desc_act=True)),
    "experts in awq": ("qwen3-moe", awq(16)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_quantised_model_gives_the_tokens_of_its_dequantised_weights(
    name: str, tmp_path: Path, on_triton: None
) -> None:
    architecture, form = MODELS[name]
    packed, whole = save_quantized(tmp_path, architecture, form)
    (path,) = Reference(whole).clear_paths(1, 2)
    runner = make_runner(packed, attention_backend="auto")
    assert isinstance(runner.model, Decoder) and runner.model.can_be_recorded
    assert isinstance(runner.model._layers[0].qkv, PackedWeightLinear)
    outputs = run(Engine(engine_config(packed), runner), [request("a", path.prompt, greedy(2))])
    assert tuple(outputs["a", 0].token_ids) == path.output


def test_mxfp4_experts_lose_nothing(tmp_path: Path, on_triton: None) -> None:
    packed, whole = save_mxfp4(tmp_path, num_hidden_layers=2, num_local_experts=2)
    prompt = (7, 30, 9, 200)
    exact = Reference(whole).logits(prompt)[-1].log_softmax(-1)
    runner = make_runner(packed, attention_backend="auto")
    assert isinstance(runner.model, Decoder) and runner.model.can_be_recorded
    mixture = runner.model._layers[0].mlp
    assert isinstance(mixture, GroupedMoe) and isinstance(mixture._down, GroupedPackedWeight)
    assert mixture._down.bits == 4
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    (found,) = run(Engine(engine_config(packed), runner), [request("a", prompt, params)]).values()
    assert all(abs(value - float(exact[token])) < 1e-3 for token, value in found.logprobs[0].top)


def test_a_whole_model_is_quantised_to_8_bits(checkpoint: Any, on_triton: None) -> None:
    """The experts and the head are converted, too; logits stay close."""
    folder, tops = checkpoint("mixtral"), []
    for quantization in ("none", "int8"):
        runner = make_runner(folder, attention_backend="auto", quantization=quantization)
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
        outputs = run(Engine(engine_config(folder), runner), [request("a", range(20, 28), params)])
        tops.append(dict(outputs["a", 0].logprobs[0].top))
    assert isinstance(runner.model, Decoder) and runner.model.can_be_recorded
    assert isinstance(runner.model._lm_head, PackedWeightLinear)
    common = tops[0].keys() & tops[1].keys()
    assert tops[0] != tops[1] and len(common) > 12
    assert max(abs(tops[0][token] - tops[1][token]) for token in common) < 1.0


def test_8_bits_need_kernels_for_them(checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match="int8 needs the native CPU kernels.*or a native model"):
        make_runner(checkpoint("qwen2"), attention_backend="reference", quantization="int8")
