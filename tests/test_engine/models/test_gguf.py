"""GGUF files are read as they come: the greedy tokens are those of a published checkpoint with the
same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from headrace_common.text.gguf.header import TYPES
from headrace_engine import LLM, SamplingParams, attention
from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.checkpoints.gguf_tensors import BLOCKS, GGUFTensors
from headrace_engine.core.errors import CheckpointError, ConfigError
from headrace_engine.engine.engine import Engine
from headrace_engine.layers import gguf_weight
from headrace_engine.layers.gguf_weight import GGUFWeight
from headrace_engine.model_loader import loader
from headrace_engine.model_loader.describe_model import describe
from headrace_testing.checkpoints import Reference
from headrace_testing.engines import cpu_backends, engine_config, greedy, make_runner, request, run
from headrace_testing.gguf_checkpoints import save_gguf
from headrace_testing.gguf_files import TINY, byte_level_values, model_values, write_gguf

LENGTH = 8
# As llama.cpp's mixes are made: most matrices of one type, some of a better one.
MIXES = {
    "F32": ("F32", "F32"),
    "F16": ("F16", "F16"),
    "BF16": ("BF16", "BF16"),
    "Q8_0": ("Q8_0", "Q8_0"),
    "Q4_0": ("Q4_0", "Q4_1"),
    "Q5_0": ("Q5_0", "Q5_1"),
    "Q4_K_M": ("Q4_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K"),
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2-moe": {"mlp_only_layers": [], "norm_topk_prob": False},
    "qwen3-moe": {"mlp_only_layers": [], "norm_topk_prob": True},
}
_MOE = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}


def mix(name: str) -> Any:
    most, better = MIXES[name]

    def type_of(tensor: str) -> str:
        if "ffn_gate_inp" in tensor:
            return "F32"
        return better if "attn_v" in tensor or tensor.startswith(("token_embd", "output")) else most

    return type_of


def check(file: Path, whole: Path, **options: Any) -> Engine:
    """The greedy tokens of the file are those of transformers with the same weights."""
    paths = Reference(whole).clear_paths(3, LENGTH)
    engine = Engine(engine_config(file, **options), make_runner(file, **options))
    outputs = run(
        engine,
        [request(str(index), path.prompt, greedy(LENGTH)) for index, path in enumerate(paths)],
    )
    for index, path in enumerate(paths):
        assert tuple(outputs[str(index), 0].token_ids) == path.output
    return engine


@pytest.mark.parametrize("kind", MIXES)
def test_every_type_gives_the_tokens_of_its_values(kind: str, tmp_path: Path) -> None:
    check(*save_gguf(tmp_path, "llama", mix(kind)))


@pytest.mark.parametrize("backend", cpu_backends())
@pytest.mark.parametrize("name", ["llama", "llama3-rope", "qwen2", "qwen3"])
def test_every_family_is_read(name: str, backend: str, tmp_path: Path) -> None:
    """Interleaved rows of queries and keys, biases, tied embeddings, scaled rotations."""
    check(*save_gguf(tmp_path, name, mix("Q8_0")), attention_backend=backend)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts_are_read(name: str, tmp_path: Path) -> None:
    sizes = {} if name == "mixtral" else _MOE
    check(*save_gguf(tmp_path, name, mix("Q4_K_M"), **sizes, **MIXTURES[name]))


@pytest.mark.skipif("cpu" not in cpu_backends(), reason="no native kernels")
def test_8_bits_are_a_choice(tmp_path: Path) -> None:
    """The native kernels' 8 bits have one scale for each output, which loses what blocks keep."""
    file, _ = save_gguf(tmp_path, "llama", mix("Q8_0"))
    options = {"attention_backend": "cpu", "quantization": "int8"}
    engine = Engine(engine_config(file, **options), make_runner(file, **options))
    assert len(run(engine, [request("r", (5, 6, 7), greedy(4))])["r", 0].token_ids) == 4


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_operators_with_integers_keep_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs; here in Triton's interpreter. The output matrix and V have another type, so they
    and the matrices that are stacked with V become floats."""
    pytest.importorskip("triton")
    from headrace_engine.attention.triton import TritonBackend
    from headrace_engine.operators.packed_linear import PackedWeightLinear
    from headrace_engine.operators.triton import TritonOps

    monkeypatch.setattr(attention, "select", lambda *_: TritonBackend((9, 0)))
    monkeypatch.setattr(loader, "make_ops", lambda *_: TritonOps())
    monkeypatch.setitem(MIXES, kind, (kind, "Q5_0"))
    small = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 1}
    file, whole = save_gguf(tmp_path, "llama", mix(kind), **small)
    (path,) = Reference(whole).clear_paths(1, 2)
    runner = make_runner(file, attention_backend="auto")
    layer = runner.model._layers[0]  # type: ignore[attr-defined]
    assert isinstance(layer.o, PackedWeightLinear) and not isinstance(layer.qkv, PackedWeightLinear)
    engine = Engine(engine_config(file), runner)
    output = run(engine, [request("r", path.prompt, greedy(2))])["r", 0]
    assert tuple(output.token_ids) == path.output


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_integers_have_the_values_of_their_blocks(kind: str) -> None:
    block, size = BLOCKS[kind]
    drawn = np.random.default_rng(1).integers(0, 256, (5, 3 * size), dtype=np.uint8)
    drawn.reshape(5, 3, size)[..., 1] = 40  # a scale that is a number
    weight = GGUFWeight(torch.from_numpy(drawn), kind, 3 * block)
    found = weight.quantized()
    assert found is not None and found.shape == weight.shape
    assert torch.equal(found.dequantize(), weight.dequantize())
    assert GGUFWeight(torch.from_numpy(drawn), "Q4_1", 3 * block).quantized() is None


def test_transformers_reads_the_same(tmp_path: Path) -> None:
    """Its reader of GGUF files shares no code with this one."""
    from transformers import modeling_gguf_pytorch_utils

    file, whole = save_gguf(tmp_path, "llama", mix("Q4_K_M"))
    load: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    found = load(file, return_tensors=True, model_to_load=Reference(whole).model)
    tensors, checkpoint = GGUFTensors(file), load_checkpoint(str(file))
    assert tensors.tensors.keys() == found["tensors"].keys()
    for name, expected in found["tensors"].items():
        info, content = tensors.tensors[name], tensors.load(name)
        if info.dtype in BLOCKS:
            content = GGUFWeight(content, info.dtype, info.shape[1]).dequantize()
        assert torch.equal(content, expected), name
    for field in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "head_dim", "vocab_size"):
        assert checkpoint.config[field] == found["config"][field], field


def test_text_goes_in_and_comes_out(tmp_path: Path) -> None:
    file, whole = save_gguf(tmp_path, "qwen3")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    texts = []
    for model in (file, whole):
        llm = LLM(str(model), dtype="float32", num_blocks=64)
        (output,) = llm.generate(["Hello world"], params, use_tqdm=False)
        texts.append((output.prompt_token_ids, output.outputs[0].text))
    assert texts[0] == texts[1]


def test_a_file_is_described(tmp_path: Path) -> None:
    file, _ = save_gguf(tmp_path, "qwen3", mix("Q4_K_M"))
    found = describe(load_checkpoint(str(file)))
    assert (found.architecture, found.implementation) == ("Qwen3ForCausalLM", "native")
    assert (found.quantization, found.dtype, found.max_model_len) == ("gguf", "bfloat16", 512)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_part_at_a_time_is_dequantised(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block, size = BLOCKS[kind]
    drawn = np.random.default_rng(0).integers(0, 256, (12, 2 * size), dtype=np.uint8)
    drawn[:, [0, 1, size - 2, size - 1, size, size + 1]] = 7  # no scale that is not a number
    weight = GGUFWeight(torch.from_numpy(drawn), kind, 2 * block)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(dequantize(drawn, GGMLQuantizationType[kind]))
        monkeypatch.setattr(gguf_weight, "CHUNK", 5 * 2 * block)
        whole, part = weight.dequantize(), weight.rows(1, 11, 2).dequantize(torch.bfloat16)
    assert whole.shape == weight.shape == (12, 2 * block)
    torch.testing.assert_close(whole, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(part, expected[1:11:2].bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_types_are_those_of_ggml() -> None:
    known = {kind.value: kind.name for kind in GGMLQuantizationType}
    assert TYPES.items() <= known.items()
    sizes = {kind.name: size for kind, size in GGML_QUANT_SIZES.items()}
    assert BLOCKS.items() <= sizes.items()


def changed(
    folder: Path, values: dict[str, Any], tensors: dict[str, np.ndarray], **of: str
) -> Path:
    """A file of a decoder with one layer that has these tensors beside the usual ones, of the types
    `of`; a tensor of no elements is left out."""
    ones, square = np.ones(32, dtype=np.float32), np.ones((32, 32), dtype=np.float32)
    usual = {"token_embd.weight": np.ones((300, 32), dtype=np.float32), "output_norm.weight": ones}
    for name in ("attn_norm", "ffn_norm"):
        usual[f"blk.0.{name}.weight"] = ones
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        usual[f"blk.0.{name}.weight"] = square
    written = {name: tensor for name, tensor in (usual | tensors).items() if tensor.size}
    vocabulary = {f"<{index}>": index for index in range(300)}
    tokenizer = {"model": {"vocab": vocabulary, "merges": []}, "added_tokens": []}
    keys = model_values(TINY, "llama") | byte_level_values(tokenizer, "gpt-2", 300) | values
    return write_gguf(folder / "m.gguf", keys, written, lambda name: of.get(name, "F32"))


NONE = np.zeros((0, 32), dtype=np.float32)


@pytest.mark.parametrize(
    ("values", "tensors", "message"),
    [
        ({}, {"blk.0.attn_q.weight": NONE}, r"missing tensors: model.layers.0.self_attn.q_proj"),
        ({}, {"blk.0.attn_q.weight": np.ones((16, 32), np.float32)}, r"q_proj.weight has shape"),
        ({}, {"blk.0.ssm_a.weight": np.ones((2, 2), np.float32)}, "no place for: blk.0.ssm_a"),
        ({"llama.rope.dimension_count": 8}, {}, "rope.dimension_count must be the width of a head"),
    ],
)
def test_a_file_of_another_model_is_refused(
    values: dict[str, Any], tensors: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    file = changed(tmp_path, values, tensors)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        make_runner(file)


def test_a_type_that_is_not_supported_is_named(tmp_path: Path) -> None:
    file = changed(tmp_path, {}, {}, **{"blk.0.attn_v.weight": "MXFP4"})
    with pytest.raises(ConfigError, match="has the type MXFP4, which is not supported: take a"):
        describe(load_checkpoint(str(file)))
    with pytest.raises(ConfigError, match=r"m\.gguf: a tensor has the type MXFP4"):
        make_runner(file)
    with pytest.raises(CheckpointError, match=r"blk.0.attn_v.weight has the type MXFP4"):
        GGUFTensors(file)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    file = changed(tmp_path, {}, {})
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match="is cut short: it ends within blk.0.ffn_down"):
        make_runner(file)


def test_only_native_models_read_gguf(tmp_path: Path) -> None:
    file = changed(tmp_path, {}, {})
    with pytest.raises(ConfigError, match="model_implementation transformers does not read GGUF"):
        make_runner(file, model_implementation="transformers")
    with pytest.raises(ConfigError, match=r"config\.json, which .*m\.gguf does not have"):
        LLM(str(file), hf_overrides={"rope_theta": 1.0})
    with pytest.raises(ConfigError, match="quantization gptq is for checkpoints of that kind"):
        make_runner(file, quantization="gptq")
