"""Code in a checkpoint is never imported: not that of its config, nor of its model or tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace_engine import LLM, SamplingParams
from headrace_engine.core.errors import ConfigError
from headrace_testing.checkpoints import save_checkpoint
from headrace_testing.engines import make_runner

MODULES = ("configuration_own", "modeling_own", "tokenization_own")


def with_code(folder: Path, **fields: Any) -> Path:
    """Adds code to both of the checkpoint's configs; importing it would write a file `mark`."""
    for module in MODULES:
        (folder / f"{module}.py").write_text(
            f"from pathlib import Path\nPath({str(folder / 'mark')!r}).touch()\n"
        )
    own = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": own, **fields}))
    tokenizer = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("llama", "native"), ("llama", "transformers"), ("gpt_neox", "auto")],
)
def test_known_architectures_are_served_without_the_checkpoints_code(
    name: str, implementation: str, tmp_path: Path
) -> None:
    plain = save_checkpoint(tmp_path / "plain", name)
    coded = with_code(save_checkpoint(tmp_path / "coded", name))
    answers = [
        LLM(str(folder), dtype="float32", num_blocks=64, model_implementation=implementation)
        .generate(["the cat sat"], SamplingParams(temperature=0.0, max_tokens=6))[0]
        .outputs[0]
        .token_ids
        for folder in (plain, coded)
    ]
    assert answers[0] == answers[1]
    assert not (coded / "mark").exists()


def test_native_architectures_do_not_need_a_known_model_type(tmp_path: Path) -> None:
    folder = with_code(save_checkpoint(tmp_path, "llama"), model_type="own")
    make_runner(folder)
    assert not (folder / "mark").exists()


def test_models_that_need_their_own_code_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    with_code(folder, architectures=["OwnForCausalLM"], model_type="own")
    with pytest.raises(ConfigError, match=r"OwnForCausalLM \(model_type 'own'\).*never run; use"):
        make_runner(folder)
    assert not (folder / "mark").exists()
