"""Loading checkpoints: every way a folder can be wrong is refused, by file, field and tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.core.errors import CheckpointError, ConfigError, EngineError
from headrace_engine.engine.engine import Engine
from headrace_engine.models.weights.weights import (
    INDEX_FILE,
    SINGLE_FILE,
    WeightReader,
    stored_dtype,
)
from headrace_testing.checkpoints import Reference, save_checkpoint
from headrace_testing.engines import engine_config, greedy, make_runner, request, run

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path, "llama")


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    content = json.loads(file.read_text())
    for name, value in fields.items():
        if value is ...:
            content.pop(name, None)
        else:
            content[name] = value
    file.write_text(json.dumps(content))


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE, {"format": "pt"})


def first_tokens(folder: Path, **options: Any) -> list[int]:
    engine = Engine(engine_config(folder, **options), make_runner(folder, **options))
    return run(engine, [request("r", (5, 6, 7), greedy(8))])["r", 0].token_ids


def test_sharded_weights_give_the_same_model(tmp_path: Path, folder: Path) -> None:
    shards = save_checkpoint(tmp_path / "sharded", "llama", shard="100KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert first_tokens(shards) == first_tokens(folder)


def test_tied_weights_need_no_output_matrix_and_may_have_one(tmp_path: Path) -> None:
    tied = save_checkpoint(tmp_path, "qwen2")
    assert "lm_head.weight" not in load_file(tied / SINGLE_FILE)
    expected = first_tokens(tied)
    change_tensors(tied, lambda t: t.update({"lm_head.weight": torch.zeros(256, 64)}))
    assert first_tokens(tied) == expected


def test_dtype_of_the_files_is_found_and_cast(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama", dtype=torch.float16)
    assert stored_dtype(folder) is torch.float16
    reader = WeightReader(folder, torch.float32, CPU)
    assert reader.read("model.norm.weight").dtype is torch.float32
    path = Reference(folder).path((5, 6, 7), 8)
    assert first_tokens(folder) == list(path.output)


def test_float16_is_computed_in_bfloat16_on_cpus(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama", dtype=torch.float16)
    assert make_runner(folder, dtype="auto").dtype is torch.bfloat16
    assert make_runner(folder, dtype="float16").dtype is torch.float16


def test_tensors_are_stacked_by_rows(folder: Path) -> None:
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    tensors = load_file(folder / SINGLE_FILE)
    stacked = WeightReader(folder, torch.float32, CPU).stack(names)
    assert torch.equal(stacked, torch.cat([tensors[name] for name in names]))


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing.*model\.norm\.weight"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(7)}),
            r"model\.norm\.weight",
        ),
    ],
    ids=["missing", "mis-shaped"],
)
def test_wrong_tensors_are_named(
    change: Callable[[Tensors], object], message: str, implementation: str, folder: Path
) -> None:
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message):
        make_runner(folder, model_implementation=implementation)


def test_shapes_are_compared_with_the_config(folder: Path) -> None:
    change_config(folder, intermediate_size=100)
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors: .*gate_proj.weight has shape \[96, 64\].* \[100, 64\]",
    ):
        make_runner(folder)


def test_unexpected_tensors_are_named(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({"model.extra.weight": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"no place for: model\.extra\.weight"):
        make_runner(folder)


def test_old_rotary_buffers_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda t: t.update({name: torch.zeros(8)}))
    assert len(first_tokens(folder)) == 8


def test_integer_weights_are_refused(folder: Path) -> None:
    change_tensors(
        folder, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    )
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has unsupported dtype I8"):
        make_runner(folder)


@pytest.mark.parametrize("size", [0, 4, 5000])
def test_a_truncated_file_is_named(size: int, folder: Path) -> None:
    file = folder / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable"):
        make_runner(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle.*safetensors"):
        make_runner(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        make_runner(folder)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "model.bin", 7]
)
def test_an_index_cannot_name_files_elsewhere(name: object, folder: Path) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError, match="only safetensors files beside the index"):
        make_runner(folder)


def test_an_index_that_names_a_missing_file(folder: Path) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": "model-9.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-9\.safetensors"):
        make_runner(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama", shard="100KB")
    files = sorted(folder.glob("*.safetensors"))
    save_file(load_file(files[0]) | load_file(files[1]), files[1], {"format": "pt"})
    with pytest.raises(CheckpointError, match="is also in"):
        make_runner(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {
                "architectures": ["CustomForCausalLM"],
                "model_type": "custom",
                "auto_map": {"AutoModel": "a.B"},
            },
            "CustomForCausalLM .*'custom'.* auto_map names code of the checkpoint, which is never "
            "run; use",
        ),
        ({"quantization_config": {"quant_method": "x"}}, r"quantization_config\.quant_method must"),
        ({"quantization_config": "gptq"}, "quantization_config must be an object"),
        ({"architectures": ...}, "architectures must be a list"),
        ({"architectures": []}, "architectures must be a list"),
        ({"hidden_size": "big"}, "hidden_size must be a whole number above 0, not 'big'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number"),
        ({"vocab_size": ...}, "vocab_size must be a whole number"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads must be a divisor of .* \(4\)"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_parameters": {"rope_type": "spiral"}}, r"rope_parameters\.rope_type must be one"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            r"rope_parameters\.low_freq_factor must be a number",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": "x"}},
            r"rope_scaling\.factor must be a number",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be one of 1"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], message: str, folder: Path) -> None:
    change_config(folder, **fields)
    with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
        make_runner(folder, model_implementation="native")


def test_an_unknown_architecture_is_refused(folder: Path) -> None:
    change_config(folder, architectures=["FooForCausalLM"], model_type="foo")
    with pytest.raises(ConfigError, match=r"config\.json.*foo"):
        make_runner(folder)


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', "[" * 100_000])
def test_a_broken_config_is_named(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        make_runner(folder)


def test_a_missing_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        make_runner(folder)


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/folder", "~/nowhere", "a/b/c"])
def test_a_path_that_is_not_a_folder_is_not_asked_of_the_hub(model: str) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        load_checkpoint(model)


def test_a_hub_id_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EngineError, match="neither a folder nor can it be fetched"):
        load_checkpoint("headrace/no-such-model", "main")


def test_end_of_sequence_ids_come_from_both_files(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    change_config(folder, eos_token_id=[2, 11])
    assert load_checkpoint(str(folder)).eos_token_ids == (9, 2, 11)
    assert make_runner(folder).eos_token_ids == {9, 2, 11}
