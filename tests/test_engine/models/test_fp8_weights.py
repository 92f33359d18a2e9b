"""Linear layers in 8-bit floats: the bounds of rounding, products of rounded numbers, scales of
groups, cuts for ranks, whole checkpoints that are rounded when they are loaded. Triton's kernels
run through its interpreter, which widens 8-bit floats correctly but rounds wrongly: the numbers
that it rounds here are exact in 8 bits. test_quantization tests checkpoints that are already in
fp8."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace_engine.core.errors import ConfigError
from headrace_engine.engine.engine import Engine
from headrace_engine.kernels.triton import launch as launches
from headrace_engine.kernels.triton.launch import ROW_BOUNDS, SmallBatchLaunch, VectorLaunch
from headrace_engine.layers import float8_linear
from headrace_engine.layers.float8_linear import ScaledLinear, make_float8
from headrace_engine.layers.float8_weight import (
    FLOAT8,
    Float8Weight,
    round_rows,
    round_weight,
    stack,
)
from headrace_engine.layers.triton_float8 import WeightOnlyFloat8Linear
from headrace_engine.layers.triton_float8 import round_rows as round_in_triton
from headrace_engine.models.linear import linear_maker
from headrace_engine.models.quantization.fp8_on_load import FP8OnLoad
from headrace_engine.models.weights.random_weights import RandomReader
from headrace_engine.models.weights.weights import WeightReader
from headrace_engine.operators.tuned_float8 import Float8Linear, Float8Products, Float8Shape
from headrace_testing.checkpoints import Reference, save_checkpoint
from headrace_testing.engines import engine_config, greedy, make_runner, request, run
from headrace_testing.quantized import FILE, gptq, save_fp8, save_quantized

AMPERE, HOPPER = (8, 0), (9, 0)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grouped(outputs: int, inputs: int, group: int) -> Float8Weight:
    count = -(-inputs // group)
    scales = random(outputs, count, seed=2).abs() + 0.01
    return Float8Weight(random(outputs, inputs, seed=3).to(FLOAT8), scales, group)


def test_rounding_errors_are_at_most_half_a_step() -> None:
    """2^-4 of a number, or half of the smallest subnormal, 2^-10, times the scale."""
    x = random(40, 300) * torch.logspace(-12, 6, 40)[:, None]
    values, scales = round_rows(x)
    error = (values.float() * scales - x).abs()
    assert bool((error <= torch.maximum(x.abs() * 2**-4, scales * 2**-10) * 1.0001).all())
    assert values.float().abs().amax(dim=1).eq(448).all()


def test_zeros_and_broken_numbers() -> None:
    values, scales = round_rows(torch.tensor([[0.0, 0.0], [1.0, torch.nan]]))
    widened = values.float() * scales
    assert widened[0].eq(0).all() and widened[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_products_use_the_rounded_inputs(dtype: torch.dtype) -> None:
    x, weight, bias = random(2, 5, 64).to(dtype), round_weight(random(48, 64, seed=1)), random(48)
    found = ScaledLinear(weight, bias.to(dtype), CPU)(x)
    values, scales = round_rows(x.flatten(0, 1))
    exact = (values.double() * scales) @ weight.dequantize().double().T + bias.to(dtype)
    # Sums of 64 products in float32, or two results rounded to bfloat16.
    bound = 1e-5 if dtype is torch.float32 else 2 * 2**-8
    torch.testing.assert_close(found.flatten(0, 1).double(), exact, rtol=bound, atol=bound)
    assert ScaledLinear(weight, None, CPU)(x[:0]).shape == (0, 5, 48)


@pytest.mark.parametrize("group", [64, 128, 200])
@pytest.mark.parametrize(("tokens", "capability"), [(1, AMPERE), (1, HOPPER), (33, AMPERE)])
def test_widened_products_take_scales_of_groups(
    tokens: int, group: int, capability: tuple[int, int]
) -> None:
    """There are more rows than in a tile, and no size is a multiple of a tile; 200 inputs are one
    group."""
    weight, bias = grouped(75, 200, group), random(75, seed=4).to(DEVICE)
    x = random(tokens, 200, seed=5)
    layer = WeightOnlyFloat8Linear(weight, bias if tokens == 1 else None, DEVICE, capability)
    exact = x.double() @ weight.dequantize().double().T
    exact = exact + bias.cpu() if tokens == 1 else exact
    found = layer(x.to(DEVICE)).cpu().double()
    # Sums of 200 products in float32 of these magnitudes.
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("capability", "group"), [(AMPERE, 64), (HOPPER, 0)])
def test_few_rows_of_widened_products(
    capability: tuple[int, int], group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outputs fill no tile; inputs are whole or split, and any program may end last."""
    tiles = (SmallBatchLaunch(32, 64, 1, 4, 3), SmallBatchLaunch(64, 32, 1, 4, 3))
    monkeypatch.setattr(launches, "FLOAT8_TILES", tiles)
    monkeypatch.setattr(launches, "FEWEST_PROGRAMS", 1)
    monkeypatch.setattr(launches, "SPLITS", (1, 4))
    weight = grouped(80, 256, group or 256)
    products = Float8Products()
    layer = products.layer(weight, random(80, seed=4).bfloat16().to(DEVICE), DEVICE, capability)
    assert isinstance(layer, Float8Linear)
    ((shape, tuned),) = products.shapes.items()
    assert shape == Float8Shape(80, 256, group, scaled=not group)
    assert [one.splits for one in shape.candidates] == [1, 4, 1, 4]
    exact = weight.dequantize().double().T
    for rows in (1, 19):
        x = random(rows, 256, seed=5).bfloat16()
        wanted = x.double() @ exact + random(80, seed=4).bfloat16().double()
        for launch in shape.candidates:
            found = layer.small_batch(x.to(DEVICE), launch)
            error = (found.cpu().double() - wanted).norm() / wanted.norm()
            assert error < 2**-8 and torch.equal(layer.small_batch(x.to(DEVICE), launch), found)
        for vector in (VectorLaunch(8, 128, 4), VectorLaunch(16, 256, 2)):
            if rows == 1 and not group:
                found = layer.small_batch(x.to(DEVICE), vector)
                assert (found.cpu().double() - wanted).norm() / wanted.norm() < 2**-8
    assert bool(Float8Shape(80, 4096, group, scaled=not group).vector_candidates) == (not group)
    # Without measurements, rows are rounded if that is allowed; other rows count as few up to
    # ROW_BOUNDS.
    assert tuned.chosen == [None if shape.scaled else shape.candidates[0]] * len(ROW_BOUNDS)
    few = (
        layer.many(x.to(DEVICE))
        if shape.scaled
        else layer.small_batch(x.to(DEVICE), shape.candidates[0])
    )
    assert torch.equal(layer(x.to(DEVICE)), few)
    many = random(65, 256).bfloat16().to(DEVICE)
    assert torch.equal(layer(many), layer.many(many))


def test_rows_are_rounded_in_one_launch() -> None:
    """The numbers are exact in e4m3, times powers of two."""
    x = torch.tensor([[448.0, -20.0, 0.5, 2**-9], [7 * 2.0, 1.0, -3.0, 0.0]]).repeat(1, 5)
    x[1] *= 2**-20
    values, scales = round_in_triton(x.to(DEVICE))
    expected, expected_scales = round_rows(x)
    assert torch.equal(values.cpu().float(), expected.float())
    torch.testing.assert_close(scales.cpu(), expected_scales, rtol=1e-6, atol=0)


def test_the_kind_of_layer_follows_device_and_sizes() -> None:
    row, odd, blocks = (
        round_weight(random(32, 64)),
        round_weight(random(20, 64)),
        grouped(32, 256, 128),
    )
    assert isinstance(make_float8(row, None, CPU, HOPPER), ScaledLinear)
    for weight, capability in ((row, AMPERE), (odd, HOPPER), (blocks, HOPPER)):
        assert isinstance(make_float8(weight, None, CPU, capability), WeightOnlyFloat8Linear)
    assert make_float8(grouped(32, 96, 32), None, CPU, HOPPER) is None
    assert not float8_linear.supports_float8(CPU)


def test_parts_of_a_matrix() -> None:
    weight = grouped(6, 200, 64)
    whole = weight.dequantize()
    assert torch.equal(weight.rows(1, 4).dequantize(), whole[1:4])
    assert torch.equal(weight.columns(64, 192).dequantize(), whole[:, 64:192])
    assert torch.equal(weight.columns(128, 200).dequantize(), whole[:, 128:])
    assert weight.can_cut(64, 128) and not weight.can_cut(100, 200)
    one = round_weight(whole)
    assert one.can_cut(100, 200)
    assert torch.equal(one.columns(100, 200).dequantize(), one.dequantize()[:, 100:])
    joined = stack([weight.rows(0, 2), weight.rows(2, 6)])
    assert joined is not None and torch.equal(joined.dequantize(), whole)
    assert stack([weight, one]) is None


@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral"])
def test_whole_checkpoints_are_rounded_when_they_are_loaded(name: str, tmp_path: Path) -> None:
    """The result equals a checkpoint quantised with a scale for each output."""
    _, rounded = save_fp8(tmp_path / "rounded", name, None)
    whole, expected = save_checkpoint(tmp_path / "whole", name), load_file(rounded / FILE)
    reader = WeightReader(whole, torch.float32, CPU, quantized=FP8OnLoad(CPU))
    reader.check({key: tuple(one.shape) for key, one in expected.items()})
    for key, tensor in expected.items():
        if not key.endswith(".gate.weight"):  # an expert weight, which stays unrounded
            torch.testing.assert_close(reader.read(key), tensor, rtol=1e-6, atol=0)


def test_a_rounded_checkpoint_gives_its_tokens(tmp_path: Path) -> None:
    """Rounding twice changes nothing."""
    _, rounded = save_fp8(tmp_path, "llama", None)
    (path,) = Reference(rounded).clear_paths(1, 8)
    options: dict[str, Any] = {"quantization": "fp8"}
    engine = Engine(engine_config(rounded, **options), make_runner(rounded, **options))
    found = run(engine, [request("a", path.prompt, greedy(8))])
    assert tuple(found["a", 0].token_ids) == path.output


def test_a_model_of_scaled_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes like GPUs from Ada on; only the head multiplies unquantised numbers."""
    folder = save_checkpoint(tmp_path, "llama")
    made: list[ScaledLinear] = []

    def make(*arguments: Any) -> ScaledLinear:
        made.append(ScaledLinear(*arguments))
        return made[-1]

    monkeypatch.setattr(linear_maker, "supports_float8", lambda _: True)
    monkeypatch.setattr(float8_linear, "ScaledLinear", make)
    options: dict[str, Any] = {"quantization": "fp8"}
    runner = make_runner(folder, **options)
    layers = len(runner.model.kv_shapes)
    assert len(made) == 4 * layers
    outputs = run(
        Engine(engine_config(folder, **options), runner), [request("a", [5] * 9, greedy(4))]
    )
    assert len(outputs["a", 0].token_ids) == 4


def test_random_weights_are_rounded_too() -> None:
    reader = RandomReader(torch.float32, CPU, float8=True)
    reader.check({"model.layers.0.mlp.up_proj.weight": (32, 16), "lm_head.weight": (8, 16)})
    found = reader.float8(["model.layers.0.mlp.up_proj.weight"])
    assert found is not None and found.shape == (32, 16)
    assert reader.float8(["lm_head.weight"]) is None


def test_random_weights_can_be_integers_too() -> None:
    reader = RandomReader(torch.float32, CPU, grouped=Drawn())
    reader.check({"layers.0.mlp.up_proj.weight": (64, 100), "lm_head.weight": (8, 16)})
    found = reader.quantized(["layers.0.mlp.up_proj.weight"] * 2)
    assert found is not None and found.shape == (128, 100) and found.scales.shape == (128, 7)
    assert set(found.values.flatten().tolist()) == set(range(1, 16))
    numbers = found.dequantize()
    assert abs(float(numbers.std()) - 0.02) < 0.002 and abs(float(numbers.mean())) < 0.002
    assert reader.quantized(["lm_head.weight"]) is None


class Drawn:
    bits, group_size = 4, 16


def test_other_quantisations_are_not_rounded(tmp_path: Path) -> None:
    packed, whole = save_quantized(tmp_path, "llama", gptq())
    with pytest.raises(ConfigError, match=r"quantization fp8 is for .* quantised with gptq"):
        make_runner(packed, quantization="fp8")
    with pytest.raises(ConfigError, match="quantization fp8 needs one of the native models"):
        make_runner(whole, quantization="fp8", model_implementation="transformers")
