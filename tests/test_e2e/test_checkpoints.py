"""An engine that cannot load its checkpoint reports the wrong file or field, and ends."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_testing.checkpoints import save_checkpoint
from headrace_testing.processes import Starter
from headrace_testing.stack import EngineProcess

NO_REDIS = "redis://127.0.0.1:1/0"  # never connected to: the model is loaded first
EX_CONFIG = 78


def edit(file: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def with_code(folder: Path) -> None:
    foreign = {"architectures": ["CustomForCausalLM"], "model_type": "custom"}
    edit(folder / "config.json", lambda c: c.update(foreign, auto_map={"AutoModel": "evil.Model"}))
    (folder / "evil.py").write_text("raise SystemExit('code of a checkpoint was run')")


def climbing(folder: Path) -> None:
    edit(
        folder / "model.safetensors.index.json",
        lambda index: index["weight_map"].update({"lm_head.weight": "../../secret.safetensors"}),
    )


def without_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def misshaped(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


# the kind of damage -> the words that the message must contain
CASES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "pickle": (pickled, ("pytorch_model.bin", "pickle", "safetensors")),
    "code": (with_code, ("config.json", "CustomForCausalLM", "auto_map")),
    "traversal": (climbing, ("model.safetensors.index.json", "../../secret.safetensors")),
    "missing": (without_tensor, ("model.layers.1.mlp.up_proj.weight", "missing")),
    "shape": (misshaped, ("model.safetensors", "q_proj.weight", "[63, 64]", "[64, 64]")),
    "cut": (cut_short, ("model.safetensors",)),
}


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, start: Starter
) -> Iterator[dict[str, EngineProcess]]:
    """One engine for each case, all started at once."""
    folder = tmp_path_factory.mktemp("broken")
    started: dict[str, EngineProcess] = {}
    try:
        for name, (spoil, _) in CASES.items():
            shard = "50KB" if name == "traversal" else "1GB"
            checkpoint = save_checkpoint(folder / name, "llama", shard=shard)
            spoil(checkpoint)
            log = folder / f"{name}.log"
            started[name] = EngineProcess(checkpoint, NO_REDIS, log, start=start)
        yield started
    finally:
        for engine in started.values():
            engine.kill()


@pytest.mark.parametrize("name", CASES)
def test_a_broken_checkpoint_is_named(engines: dict[str, EngineProcess], name: str) -> None:
    engine = engines[name]
    assert engine.wait() == EX_CONFIG
    errors = [entry for entry in engine.log_entries() if entry["level"] == "ERROR"]
    assert len(errors) == 1, engine.log.read_text()
    assert all(word in str(errors[0]["error"]) for word in CASES[name][1]), errors
