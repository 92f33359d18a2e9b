"""Published checkpoints at their true size, as `headrace models check` compares them: each stored
tensor has its place, and its shape is the one that config.json asks for."""

import json
from pathlib import Path

import pytest

from headrace_engine.checkpoints.architectures import RECURRENT
from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.core.errors import CheckpointError, ConfigError
from headrace_engine.model_loader.describe_model import describe
from headrace_testing.published_models import PUBLISHED, StoredTensor, published, write_checkpoint

NAMES = sorted(path.stem for path in PUBLISHED.glob("*.json"))
DENSE = "meta-llama--Meta-Llama-3.1-405B"
DIVIDED = (
    (DENSE, 2),
    (DENSE, 4),
    (DENSE, 8),
    ("mistralai--Mixtral-8x22B-v0.1", 8),
    ("openai--gpt-oss-20b", 4),
    ("openai--gpt-oss-20b", 8),
    ("Qwen--Qwen3-30B-A3B", 4),
    ("meta-llama--Llama-4-Scout-17B-16E-Instruct", 8),
)


@pytest.mark.parametrize("name", NAMES)
def test_each_tensor_has_its_place(name: str, tmp_path: Path) -> None:
    config, tensors = published(name)
    write_checkpoint(tmp_path, config, tensors)

    found = describe(load_checkpoint(str(tmp_path)))

    assert (found.implementation, found.tensors) == ("native", len(tensors))


@pytest.mark.parametrize(("name", "ranks"), DIVIDED)
def test_ranks_divide_it(name: str, ranks: int, tmp_path: Path) -> None:
    config, tensors = published(name)
    write_checkpoint(tmp_path, config, tensors)

    found = describe(load_checkpoint(str(tmp_path)), ranks)

    assert found.tensors == len(tensors)


def test_ranks_that_cannot_divide_it_are_refused(tmp_path: Path) -> None:
    config, tensors = published(DENSE)
    write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide"):
        describe(load_checkpoint(str(tmp_path)), 3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model.norm.weight": StoredTensor("BF16", (16384, 2))}, "model.norm.weight has shape"),
        ({"model.norm.weight": None}, "missing tensors: model.norm.weight"),
        ({"model.extra.weight": StoredTensor("BF16", (8,))}, "no place for: model.extra.weight"),
    ],
)
def test_a_wrong_tensor_is_named(
    changed: dict[str, StoredTensor | None], message: str, tmp_path: Path
) -> None:
    config, tensors = published(DENSE)
    wrong = {**tensors, **changed}
    kept = {name: tensor for name, tensor in wrong.items() if tensor is not None}
    write_checkpoint(tmp_path, config, kept)
    with pytest.raises(CheckpointError, match=message):
        describe(load_checkpoint(str(tmp_path)))


def test_published_models_are_of_many_kinds() -> None:
    configs = [json.loads((PUBLISHED / f"{name}.json").read_text())["config"] for name in NAMES]
    kinds = {config["architectures"][0] for config in configs}
    assert len(NAMES) >= 25
    assert kinds & set(RECURRENT)
