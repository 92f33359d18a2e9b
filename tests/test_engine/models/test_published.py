"""Published checkpoints, as `headrace models check` compares them: each stored tensor has its
place, and its shape, at its true size, is the one that config.json asks for."""

from pathlib import Path

import pytest

from headrace_engine.checkpoints.architectures import RECURRENT
from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.core.errors import CheckpointError, ConfigError
from headrace_engine.model_loader.describe_model import describe
from headrace_testing.published_models import (
    PUBLISHED,
    StoredTensor,
    published,
    read_published,
    tensor_count,
    write_checkpoint,
)

NAMES = sorted(path.stem for path in PUBLISHED.glob("*.json"))
CONFIGS = {name: read_published(name)["config"] for name in NAMES}
ARCHITECTURES = {name: config["architectures"][0] for name, config in CONFIGS.items()}
# Those whose first layers are a model: the others' have no attention.
DECODERS = [name for name in NAMES if not name.startswith(("ibm-granite--", "nvidia--"))]
DENSE = "meta-llama--Meta-Llama-3.1-405B"
WITH_DRAFTS = "XiaomiMiMo--MiMo-7B-Base"
# More tensors take seconds. Of such checkpoints, except two, only the first layers are compared.
MANY = 25_000
FEW = 8
WHOLE = ("deepseek-ai--DeepSeek-V3", "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16")
# With so many, only eight ranks are tried.
MANY_OF_FEW_LAYERS = 10_000
# Whose 20 heads eight ranks do not divide.
UP_TO_FOUR = ("baidu--ERNIE-4.5-21B-A3B-PT", "zai-org--GLM-4.7-Flash")


@pytest.mark.parametrize("name", NAMES)
def test_each_tensor_has_its_place(name: str, tmp_path: Path) -> None:
    whole = name in WHOLE or tensor_count(name) <= MANY
    config, tensors = published(name, None if whole else FEW)
    write_checkpoint(tmp_path, config, tensors)

    found = describe(load_checkpoint(str(tmp_path)))

    assert (found.implementation, found.tensors) == ("native", len(tensors))


@pytest.mark.parametrize("name", DECODERS)
def test_ranks_divide_it(name: str, tmp_path: Path) -> None:
    """The dense layers, and one with experts, or the first five."""
    config = CONFIGS[name]
    dense = config.get("text_config", config).get("first_k_dense_replace", 4)
    layers = 5 if ARCHITECTURES[name] in RECURRENT else dense + 1
    config, tensors = published(name, layers)
    write_checkpoint(tmp_path, config, tensors)
    checkpoint = load_checkpoint(str(tmp_path))
    for ranks in (2, 4) if len(tensors) < MANY_OF_FEW_LAYERS else ():
        assert describe(checkpoint, ranks).tensors == len(tensors)
    if name in UP_TO_FOUR:
        with pytest.raises(ConfigError, match="tensor_parallel_size 8 does not divide"):
            describe(checkpoint, 8)
    else:
        assert describe(checkpoint, 8).tensors == len(tensors)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tensor_of_the_layer_for_drafts_is_compared(ranks: int, tmp_path: Path) -> None:
    config, tensors = published(WITH_DRAFTS)
    name = "model.mtp_layers.0.mlp.down_proj.weight"
    write_checkpoint(tmp_path, config, {**tensors, name: StoredTensor("BF16", (4096, 11007))})
    with pytest.raises(CheckpointError, match=f"{name} has shape"):
        describe(load_checkpoint(str(tmp_path)), ranks)


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
    assert len(NAMES) >= 25
    assert set(ARCHITECTURES.values()) & set(RECURRENT)
