"""Decoders with recurrent layers give the tokens of their dequantised weights, if the engine
computes with the stored numbers. With the native kernels, which keep 4 or 8 bits and round rows,
logits stay close. Rounding at load changes the projections of recurrent layers too."""

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from headrace_common.sampling.params import SamplingParams
from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.core.errors import CheckpointError
from headrace_engine.engine.engine import Engine
from headrace_engine.kernels.cpu.executor import PackedLinear
from headrace_engine.layers.float8_weight import round_weight
from headrace_engine.model_loader.describe_model import describe
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.models.hybrid.decoder import HybridDecoder
from headrace_engine.models.linear.native_linear import NativeLinear
from headrace_testing.checkpoints import HYBRID, Reference, save_checkpoint
from headrace_testing.engines import cpu_backends, engine_config, make_runner, request, run
from headrace_testing.greedy import serve
from headrace_testing.quantized import FILE, Format, awq, compressed, gptq, save_fp8, save_quantized

LENGTH = 6
PROMPT = tuple(range(20, 50))
# Those whose numbers of outputs do not fill AWQ's words.
UNEVEN = ("kimi-linear", "falcon-h1", "falcon-h1-norm")
# Whose experts are one tensor.
STACKED = "granite-hybrid"
ALL_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3-next": {"num_experts": 2, "num_experts_per_tok": 2},
    STACKED: {"num_local_experts": 2, "intermediate_size": 64},
}
SHALLOW: dict[str, dict[str, Any]] = {
    "qwen3_5-moe": {
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "falcon-mamba": {},
}
LINEAR = (
    *("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "gate_proj.weight"),
    *("up_proj.weight", "down_proj.weight", "in_proj_qkvz.weight", "out_proj.weight"),
)
native_kernels = pytest.mark.skipif("cpu" not in cpu_backends(), reason="no native kernels")


@pytest.mark.proves("quantised")
@pytest.mark.parametrize("name", HYBRID)
def test_products_use_the_stored_numbers(name: str, tmp_path: Path) -> None:
    form = compressed(4, 16) if name in (*UNEVEN, STACKED) else awq(16)
    folder, whole = save_quantized(tmp_path, name, form)
    serve(make_runner(folder, threads=1), Reference(whole).clear_paths(3, LENGTH))


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3_5", "qwen3_5-moe", "mamba2"])
def test_fp8_becomes_floats(name: str, tmp_path: Path) -> None:
    folder, whole = save_fp8(tmp_path, name, (40, 24))
    serve(make_runner(folder, threads=1), Reference(whole).clear_paths(3, LENGTH))


def best(folder: Path, runner: ModelRunner) -> dict[int, float]:
    """The log probabilities of the most likely tokens after PROMPT."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    found = run(Engine(engine_config(folder), runner), [request("r", PROMPT, params)])["r", 0]
    return dict(found.logprobs[0].top)


@native_kernels
@pytest.mark.parametrize(
    ("name", "form", "bits"),
    [
        ("qwen3_5", compressed(8, None), 8),
        ("qwen3-next", gptq(size=64), 4),
        (STACKED, compressed(4, 64), 4),
        ("mamba2", gptq(size=64), 4),
        ("lfm2", gptq(desc_act=True), 8),
    ],
)
def test_native_kernels_keep_few_bits(name: str, form: Format, bits: int, tmp_path: Path) -> None:
    """Mixtures choose all their experts: rounding never changes the choice."""
    folder, whole = save_quantized(tmp_path, name, form, **ALL_EXPERTS.get(name, {}))
    runner = make_runner(folder, attention_backend="cpu", threads=1)
    layer = packed_output(runner)
    assert layer.scales is not None and (layer.zeros is None) == (bits == 8)
    exact = Reference(whole).logits(PROMPT)[-1].log_softmax(-1)
    errors = [abs(value - float(exact[token])) for token, value in best(folder, runner).items()]
    assert sum(errors) / len(errors) < 0.07 * float(exact.std())


@pytest.mark.parametrize(
    "form", [compressed(8, None, packed=False), compressed(4, 16, symmetric=False)]
)
def test_experts_in_one_tensor_are_unpacked(form: Format, tmp_path: Path) -> None:
    folder, whole = save_quantized(tmp_path, STACKED, form)
    assert describe(load_checkpoint(str(folder))).quantization == "compressed-tensors"
    serve(make_runner(folder, threads=1), Reference(whole).clear_paths(2, LENGTH))


def test_experts_in_one_tensor_are_refused_in_other_formats(tmp_path: Path) -> None:
    folder, _ = save_quantized(tmp_path, STACKED, gptq())
    with pytest.raises(CheckpointError, match="all experts in one tensor quantised with gptq"):
        make_runner(folder)


@native_kernels
@pytest.mark.parametrize("name", ["qwen3_5-moe", "falcon-mamba"])
def test_int8_at_load(name: str, tmp_path: Path) -> None:
    """The small products before decays and time steps are not rounded."""
    folder = save_checkpoint(tmp_path, name, published=False, **SHALLOW[name])
    runner = make_runner(folder, attention_backend="cpu", threads=1, quantization="int8")
    assert packed_output(runner).scales is not None
    exact = Reference(folder).logits(PROMPT)[-1].log_softmax(-1)
    errors = [abs(value - float(exact[token])) for token, value in best(folder, runner).items()]
    assert 0 < sum(errors) / len(errors) < 0.07 * float(exact.std())
    first, second = (part.layer for part in runner.model._weights.parts[:2])  # type: ignore[attr-defined]
    if name == "falcon-mamba":
        assert packed(first.selection).scales is None
        return
    assert packed(first.projections.ba).scales is None
    assert packed(second.feed_forward.experts[0].down).scales is not None


def test_fp8_at_load(tmp_path: Path) -> None:
    """On CPUs weights are rounded, then computed in floats."""
    folder = save_checkpoint(tmp_path / "whole", "qwen3-next")
    wanted = tmp_path / "rounded"
    copytree(folder, wanted)
    tensors = load_file(folder / FILE)
    names = [name for name in tensors if name.endswith(LINEAR)]
    assert len(names) > 40
    for name in names:
        tensors[name] = round_weight(tensors[name]).dequantize()
    save_file(tensors, wanted / FILE, {"format": "pt"})
    paths = Reference(wanted).clear_paths(3, LENGTH)
    serve(make_runner(folder, threads=1, quantization="fp8"), paths)


def packed_output(runner: ModelRunner) -> PackedLinear:
    """The last product of the first recurrent layer."""
    assert isinstance(runner.model, HybridDecoder)
    return packed(runner.model._weights.parts[0].layer.output)  # type: ignore[attr-defined]


def packed(linear: object) -> PackedLinear:
    assert isinstance(linear, NativeLinear)
    return linear._layer
