"""Quantised checkpoints give the tokens of their dequantised weights: exactly, if the engine
computes with the stored numbers. With the native kernels, which keep 8 bits with one scale for each
output, logits stay close."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headrace_common.sampling.params import SamplingParams
from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.core.errors import CheckpointError, ConfigError
from headrace_engine.engine.engine import Engine
from headrace_engine.layers.mxfp4_weight import MXFP4Weight
from headrace_engine.model_loader.describe_model import describe
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.models.decoder.decoder import Decoder
from headrace_engine.models.decoder.fused import FusedDecoder
from headrace_engine.models.linear.linear_maker import QuantizedLinear
from headrace_testing.checkpoints import Reference, save_checkpoint
from headrace_testing.engines import cpu_backends, engine_config, greedy, make_runner, request, run
from headrace_testing.quantized import (
    FILE,
    Format,
    awq,
    compressed,
    gptq,
    save_fp8,
    save_mxfp4,
    save_quantized,
)

LENGTH = 8
FORMATS: dict[str, Format] = {
    "gptq": gptq(),
    "gptq symmetric": gptq(symmetric=True),
    "gptq desc_act": gptq(desc_act=True),
    "gptq v2": gptq(version="gptq_v2"),
    "gptq one group": gptq(size=None),
    "gptq 8 bits": gptq(bits=8),
    "gptq 2 bits": gptq(bits=2, size=16),
    "awq": awq(),
    "w4a16": compressed(4, 32),
    "w4a16 asymmetric": compressed(4, 32, symmetric=False),
    "w8a16": compressed(8, None),
    "w8a8": compressed(8, None, packed=False),
    "w8a8 asymmetric": compressed(8, None, symmetric=False, packed=False),
}
native_kernels = pytest.mark.skipif("cpu" not in cpu_backends(), reason="no native kernels")


def check(packed: Path, whole: Path, **options: Any) -> Engine:
    """The greedy tokens of the packed checkpoint are those of transformers with dequantised
    weights."""
    paths = Reference(whole).clear_paths(3, LENGTH)
    engine = Engine(engine_config(packed, **options), make_runner(packed, **options))
    outputs = run(
        engine,
        [request(str(index), path.prompt, greedy(LENGTH)) for index, path in enumerate(paths)],
    )
    for index, path in enumerate(paths):
        assert tuple(outputs[str(index), 0].token_ids) == path.output
    return engine


@pytest.mark.proves("quantised", shapes=["llama"])
@pytest.mark.parametrize("form", FORMATS)
def test_products_use_the_stored_numbers(form: str, tmp_path: Path) -> None:
    check(*save_quantized(tmp_path, "llama", FORMATS[form]))


@pytest.mark.proves("quantised")
@pytest.mark.parametrize(
    "name",
    [
        "phi3",
        "mixtral",
        "gemma3",
        "qwen2",
        "glm4-moe",
        "mimo-v2",
        "deepseek-v3",
        "glm-moe-dsa-shared",
        "longcat-flash",
    ],
)
def test_every_layout_of_matrices_can_be_quantised(name: str, tmp_path: Path) -> None:
    """One matrix for QKV, experts, more norms, and biases beside packed weights."""
    form = awq(16) if name != "qwen2" else Format(gptq().config, gptq().round, without_bias)
    check(*save_quantized(tmp_path, name, form))


@pytest.mark.proves("tokens", architectures=["KimiK25ForConditionalGeneration"])
@pytest.mark.proves("quantised", architectures=["KimiK25ForConditionalGeneration"])
def test_kimi_k25_as_it_is_published(tmp_path: Path) -> None:
    """Experts have 4 bits, which the decoder's part of config.json says; the names are not those of
    transformers."""
    name, form = "kimi-k25-multimodal", compressed(4, 16)
    packed, whole = save_quantized(tmp_path, name, form, part=".mlp.experts.")
    file = packed / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] |= {
        "model_type": "kimi_k2",
        "quantization_config": config.pop("quantization_config"),
    }
    own = {"AutoConfig": "configuration_kimi_k25.KimiK25Config"}
    config |= {"architectures": ["KimiK25ForConditionalGeneration"], "auto_map": own}
    file.write_text(json.dumps(config))
    check(packed, whole, model_implementation="native")
    found = describe(load_checkpoint(str(packed)))
    assert (found.implementation, found.quantization) == ("native", "compressed-tensors")


def without_bias(found: Any) -> dict[str, torch.Tensor]:
    packed = gptq().pack(found)
    del packed["bias"]
    return packed


def test_4_bits_stay_4_bits(tmp_path: Path) -> None:
    packed, _ = save_quantized(tmp_path, "llama", gptq())
    model = make_runner(packed).model
    assert isinstance(model, Decoder)
    layer = model._layers[0].o
    assert isinstance(layer, QuantizedLinear)
    assert layer._values.dtype is torch.uint8 and layer._values.numel() == 64 * 64 // 2


@pytest.mark.proves("quantised", shapes=["qwen3"])
@pytest.mark.parametrize("block", [(16, 16), (40, 24), None])
def test_fp8_becomes_floats(block: tuple[int, int] | None, tmp_path: Path) -> None:
    check(*save_fp8(tmp_path, "qwen3", block))


@pytest.mark.parametrize("block", [(40, 24), None])
def test_fp8_of_compressed_tensors(block: tuple[int, int] | None, tmp_path: Path) -> None:
    check(*save_fp8(tmp_path, "llama", block, compressed_tensors=True))


@pytest.mark.proves("quantised", shapes=["gpt-oss"])
@pytest.mark.parametrize("backend", cpu_backends())
def test_mxfp4_is_computed_as_it_is_stored(backend: str, tmp_path: Path) -> None:
    check(*save_mxfp4(tmp_path), attention_backend=backend)


def test_mxfp4_of_any_exponent_is_exact() -> None:
    blocks = torch.arange(256).view(1, 1, 16, 16).expand(1, 16, 16, 16).to(torch.uint8)
    exponents = torch.arange(0, 256, 16).view(1, 16, 1).expand(1, 16, 16).to(torch.uint8)
    weight = MXFP4Weight(blocks[0], exponents[0])
    exact = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)[0].T
    assert torch.equal(weight.dequantize(), exact)


PROMPT = tuple(range(20, 50))


def best(folder: Path, runner: ModelRunner) -> dict[int, float]:
    """The log probabilities of the most likely tokens after PROMPT."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    found = run(Engine(engine_config(folder), runner), [request("r", PROMPT, params)])["r", 0]
    return dict(found.logprobs[0].top)


@native_kernels
@pytest.mark.proves("quantised")
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("llama", "gptq"),
        ("phi3", "awq"),
        ("gemma2", "gptq desc_act"),
        ("glm4", "awq"),
        ("qwen3-moe", "w4a16"),
    ],
)
def test_native_kernels_keep_8_bits(name: str, form: str, tmp_path: Path) -> None:
    packed, whole = save_quantized(tmp_path, name, FORMATS[form])
    runner = make_runner(packed, attention_backend="cpu")
    assert isinstance(runner.model, FusedDecoder)
    exact = Reference(whole).logits(PROMPT)[-1].log_softmax(-1)
    errors = [abs(value - float(exact[token])) for token, value in best(packed, runner).items()]
    assert sum(errors) / len(errors) < 0.07 * float(exact.std())


@native_kernels
def test_native_kernels_keep_mxfp4_in_bfloat16(tmp_path: Path) -> None:
    packed, whole = save_mxfp4(tmp_path)
    runner = make_runner(packed, attention_backend="cpu", dtype="bfloat16")
    assert isinstance(runner.model, FusedDecoder)
    down = runner.model._weights.linears[("model.layers.0.mlp.experts.0.down_proj.weight",)]
    assert down.weight.dtype is torch.uint8 and down.group == 32
    exact = Reference(whole).logits(PROMPT)[-1].log_softmax(-1)
    errors = [abs(value - float(exact[token])) for token, value in best(packed, runner).items()]
    assert sum(errors) / len(errors) < 0.07 * float(exact.std())


@native_kernels
@pytest.mark.parametrize("name", ["gemma2", "mixtral", "gpt_neox"])
def test_any_model_can_be_converted_to_8_bits(name: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, name)
    whole = make_runner(folder, attention_backend="cpu")
    eight = make_runner(folder, attention_backend="cpu", quantization="int8")
    tops = [best(folder, runner) for runner in (whole, eight)]
    assert tops[0] != tops[1]
    common = tops[0].keys() & tops[1].keys()
    assert len(common) > 12
    assert max(abs(tops[0][token] - tops[1][token]) for token in common) < 1.0


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object], **fields: Any) -> None:
    tensors = load_file(folder / FILE)
    edit(tensors)
    save_file(tensors, folder / FILE)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))


O_PROJ = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{O_PROJ}.scales"), rf"missing tensors: {O_PROJ}\.scales"),
        (lambda t: t.pop(f"{O_PROJ}.qweight"), rf"missing tensors: {O_PROJ}\.weight"),
        (
            lambda t: t.update({f"{O_PROJ}.qzeros": torch.zeros(3, 3, dtype=torch.int32)}),
            rf"{O_PROJ}\.qzeros has shape \[3, 3\], but config.json asks for \[2, 8\]",
        ),
        (
            lambda t: t.update({f"{O_PROJ}.qweight": torch.zeros(8, 64)}),
            rf"{O_PROJ}\.qweight has unsupported dtype F32",
        ),
        (
            lambda t: t.update({f"{O_PROJ}.g_idx": torch.full((64,), 9, dtype=torch.int32)}),
            rf"{O_PROJ}\.g_idx names a group above 1",
        ),
        (lambda t: t[f"{O_PROJ}.bias"].add_(1.0), rf"no place for: {O_PROJ}\.bias"),
    ],
    ids=["no scales", "no weight", "shape", "dtype", "group", "bias"],
)
def test_wrong_tensors_are_named(
    edit: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    packed, _ = save_quantized(tmp_path, "llama", gptq())
    change(packed, edit)
    with pytest.raises(CheckpointError, match=message):
        make_runner(packed)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method must be one of gptq, awq, compressed-t"),
        ({"bits": 3}, "bits must be one of 2, 4, 8"),
        ({"group_size": 7}, "group_size must be one of -1, 16, 32"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format must be one of gptq, gptq_v2"),
        ({"quant_method": "awq", "version": "gemv"}, "version must be one of gemm"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be one of e4m3"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "format must be one of pack-quantized",
        ),
        ({"quant_method": "compressed-tensors"}, "config_groups must be one group of layers"),
    ],
)
def test_unsupported_quantisations_are_named(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    packed, _ = save_quantized(tmp_path, "llama", gptq())
    change(packed, lambda tensors: None, **fields)
    with pytest.raises(ConfigError, match=rf"config\.json: quantization_config\.{message}"):
        make_runner(packed)


def test_a_named_quantisation_must_be_the_checkpoints_own(tmp_path: Path) -> None:
    packed, whole = save_quantized(tmp_path, "llama", gptq())
    assert make_runner(packed, quantization="gptq").vocab_size > 0
    with pytest.raises(ConfigError, match=r"quantization awq is for .* quantised with gptq"):
        make_runner(packed, quantization="awq")
    with pytest.raises(ConfigError, match=r"quantization gptq is for .* is not quantised"):
        make_runner(whole, quantization="gptq")


def test_transformers_accepts_only_unquantised_weights(tmp_path: Path) -> None:
    packed, _ = save_quantized(tmp_path, "llama", gptq())
    with pytest.raises(ConfigError, match="LlamaForCausalLM is served through transformers"):
        make_runner(packed, model_implementation="transformers")
