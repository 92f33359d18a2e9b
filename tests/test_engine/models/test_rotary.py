"""Rotary tables equal transformers' for every rope type, in the old and the new format of
config.json."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.checkpoints.config import ModelConfig
from headrace_engine.core.errors import ConfigError
from headrace_engine.models.context import pick_context
from headrace_engine.models.rotary import rotary
from headrace_engine.models.rotary.rotary import RotaryTable

CONTEXT = 128
HEAD = 32
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": HEAD,
    "max_position_embeddings": CONTEXT,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FORMS: dict[str, dict[str, Any]] = {
    "absent": {},
    "old theta": {"rope_theta": 500000.0},
    "new theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 30000.0}},
    "old null": {"rope_theta": 20000.0, "rope_scaling": None},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "old linear": {"rope_theta": 20000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "new llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
    "yarn": {"rope_theta": 1e6, "rope_scaling": YARN},
    "yarn original outside": {
        "original_max_position_embeddings": 16,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    },
    "yarn options": {
        "rope_parameters": {
            **YARN,
            "rope_theta": 10000.0,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
            "truncate": False,
        }
    },
    "yarn factor": {"rope_scaling": {**YARN, "attention_factor": 1.3}},
}


def read(folder: Path, form: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**BASE, **form}))
    return ModelConfig.from_hf(load_checkpoint(str(folder)))


def table(config: ModelConfig, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = RotaryTable(config.rope, HEAD, CONTEXT, positions, torch.device("cpu"))
    return made.lookup(torch.arange(positions))


def exact(folder: Path, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    embedding: Any = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(folder))
    cos, sin = embedding(torch.zeros(1), positions[None])
    return cos[0, :, : HEAD // 2], sin[0, :, : HEAD // 2]


@pytest.mark.parametrize("form", FORMS)
def test_tables_equal_transformers(form: str, tmp_path: Path) -> None:
    config = read(tmp_path, FORMS[form])
    for ours, theirs in zip(
        table(config, CONTEXT), exact(tmp_path, torch.arange(CONTEXT)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_scalings_differ_from_each_other(tmp_path: Path) -> None:
    names = ("absent", "linear", "llama3", "yarn", "yarn options")
    sums = {float(table(read(tmp_path, FORMS[name]), CONTEXT)[0].sum()) for name in names}
    assert len(sums) == len(names)


def test_dynamic_positions_beyond_the_context_use_their_own_length(tmp_path: Path) -> None:
    config = read(tmp_path, FORMS["dynamic"])
    cos, sin = table(config, CONTEXT + 40)
    for position in (CONTEXT - 1, CONTEXT, CONTEXT + 17, CONTEXT + 39):
        theirs = exact(tmp_path, torch.tensor([position]))
        torch.testing.assert_close(cos[position], theirs[0][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sin[position], theirs[1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["yarn", "dynamic"])
def test_rows_made_by_need_equal_those_of_a_whole_table(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, length = read(tmp_path, FORMS[form]), CONTEXT + 40
    whole = table(config, length)
    monkeypatch.setattr(rotary, "WHOLE", 8)
    monkeypatch.setattr(rotary, "_ROWS", 50)
    made = RotaryTable(config.rope, HEAD, CONTEXT, length, torch.device("cpu"))
    positions = torch.tensor([3, CONTEXT - 1, CONTEXT, length - 1])
    for found, wanted in zip(made.lookup(positions), whole, strict=True):
        torch.testing.assert_close(found, wanted[positions], rtol=1e-6, atol=1e-6)
    for count in (60, 20, length):
        made.reserve(count)
        for found, wanted in zip(made.tables, whole, strict=True):
            torch.testing.assert_close(found[:count], wanted[:count], rtol=1e-6, atol=1e-6)


def test_a_long_context_takes_memory_only_for_the_positions_that_are_used(tmp_path: Path) -> None:
    config, length = read(tmp_path, FORMS["llama3"]), 10_000_000
    statm = Path("/proc/self/statm")
    before = int(statm.read_text().split()[1])
    made = RotaryTable(config.rope, HEAD, CONTEXT, length, torch.device("cpu"))
    made.reserve(1000)
    last = torch.tensor([length - 1])
    for found, wanted in zip(made.lookup(last), exact(tmp_path, last), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    grown = (int(statm.read_text().split()[1]) - before) * resource.getpagesize()
    assert grown < length * HEAD  # a whole table has four times as many bytes


PHI3: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "pad_token_id": 0,
    "original_max_position_embeddings": 32,
}
LONGROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0 + 0.01 * index for index in range(16)],
    "long_factor": [1.0 + 0.3 * index for index in range(16)],
}
LONGROPES: dict[str, dict[str, Any]] = {
    "old": {"rope_scaling": LONGROPE, "rope_theta": 20000.0},
    "su": {"rope_scaling": {**LONGROPE, "type": "su", "original_max_position_embeddings": 32}},
    "new": {"rope_parameters": {**LONGROPE, "rope_type": "longrope", "rope_theta": 10000.0}},
    "factors": {"rope_scaling": {**LONGROPE, "attention_factor": 1.25, "factor": 2.0}},
    "partial": {
        "rope_parameters": {
            **{name: LONGROPE[name][:12] for name in ("short_factor", "long_factor")},
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
        }
    },
}


@pytest.mark.parametrize("length", [32, 33, CONTEXT], ids=["original", "one more", "longest"])
@pytest.mark.parametrize("form", LONGROPES)
def test_longrope_tables_equal_transformers(form: str, length: int, tmp_path: Path) -> None:
    """Short factors within the original context; else the long ones, for early positions too."""
    config = read(tmp_path, {**PHI3, **LONGROPES[form]})
    embedding: Any = Phi3RotaryEmbedding(transformers.AutoConfig.from_pretrained(tmp_path))
    theirs = embedding(torch.zeros(1), torch.arange(length)[None])
    for ours, full in zip(table(config, length), theirs, strict=True):
        half = full.shape[-1] // 2
        torch.testing.assert_close(ours, full[0, :, :half], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"short_factor": [1.0] * 15}, "short_factor must be a list of 16 numbers above 0"),
        ({"long_factor": None}, "long_factor must be a list of 16"),
        ({"long_factor": ["a"] * 16}, "long_factor must be a list of 16"),
        ({"attention_factor": -1}, "attention_factor must be a number above 0"),
    ],
)
def test_broken_longrope_is_named(form: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: rope_scaling\.{message}"):
        read(tmp_path, {**PHI3, "rope_scaling": {**LONGROPE, **form}})


GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "layer_types": ["sliding_attention"],
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
GEMMA3_FORMS: dict[str, dict[str, Any]] = {
    "absent": {},
    "old": {
        "rope_theta": 500000.0,
        "rope_local_base_freq": 20000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "new": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        }
    },
}


@pytest.mark.parametrize("form", GEMMA3_FORMS)
def test_layers_with_a_window_have_their_own_rotation(form: str, tmp_path: Path) -> None:
    config = read(tmp_path, {**GEMMA3, **GEMMA3_FORMS[form]})
    both = {**GEMMA3, **GEMMA3_FORMS[form], "num_hidden_layers": 2}
    both["layer_types"] = ["sliding_attention", "full_attention"]
    read(tmp_path, both)
    embedding: Any = Gemma3RotaryEmbedding(transformers.AutoConfig.from_pretrained(tmp_path))
    assert config.local_rope is not None
    kinds = {"full_attention": config.rope, "sliding_attention": config.local_rope}
    for kind, rope in kinds.items():
        made = RotaryTable(rope, HEAD, CONTEXT, CONTEXT, torch.device("cpu")).tables
        theirs = embedding(torch.zeros(1), torch.arange(CONTEXT)[None], kind)
        for ours, full in zip(made, theirs, strict=True):
            torch.testing.assert_close(ours, full[0, :, : HEAD // 2], rtol=1e-6, atol=1e-6)


def test_gemma_interleaves_windows(tmp_path: Path) -> None:
    gemma2 = {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4, "sliding_window": 7}
    assert read(tmp_path, gemma2).windows == (7, None, 7, None)
    gemma3 = {**GEMMA3, "num_hidden_layers": 7, "sliding_window": 7, "layer_types": None}
    assert read(tmp_path, gemma3).windows == (7, 7, 7, 7, 7, None, 7)
    assert read(tmp_path, {**gemma3, "sliding_window_pattern": 3}).windows[:3] == (7, 7, None)


def test_layer_types_decide_which_layers_slide(tmp_path: Path) -> None:
    form = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 7,
    }
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert read(tmp_path, {**form, "max_window_layers": 2}).windows == (None, None, 7)
    assert read(tmp_path, {**form, "layer_types": kinds}).windows == (None, 7, None)
    assert read(tmp_path, {**form, "use_sliding_window": False}).windows == (None,) * 3
    with pytest.raises(ConfigError, match="layer_types must be a list of 3 names"):
        read(tmp_path, {**form, "layer_types": kinds[:2]})


def test_a_null_window_is_none_and_an_absent_one_is_the_default(tmp_path: Path) -> None:
    form = {"architectures": ["MistralForCausalLM"]}
    assert read(tmp_path, form).windows == (4096,)
    assert read(tmp_path, {**form, "sliding_window": None}).windows == (None,)


@pytest.mark.parametrize(
    ("wanted", "rope_type", "rope", "expected"),
    [
        (None, "default", {}, 100),
        (60, "default", {}, 60),
        (101, "default", {}, None),
        (None, "llama3", {"factor": 8.0, "original_max_position_embeddings": 20}, 100),
        (None, "yarn", {"factor": 4.0, "original_max_position_embeddings": 100}, 400),
        (None, "yarn", {"factor": 4.0, "original_max_position_embeddings": 25}, 100),
        (401, "yarn", {"factor": 4.0, "original_max_position_embeddings": 100}, None),
        (None, "dynamic", {"factor": 2.0}, 100),
        (200, "dynamic", {"factor": 2.0}, 200),
        (201, "dynamic", {"factor": 2.0}, None),
    ],
)
def test_the_context_follows_the_scaling(
    wanted: int | None, rope_type: str, rope: dict[str, Any], expected: int | None
) -> None:
    if expected is not None:
        assert pick_context(wanted, 100, rope_type, rope) == expected
        return
    with pytest.raises(ConfigError, match="max_model_len"):
        pick_context(wanted, 100, rope_type, rope)
