"""ColQwen2 and ColPali make a vector for each token of a text or an image, equal to transformers':
ColQwen2 in chunks, ColPali with all tokens in one step, both with other prompts in a step.

Positions of ColQwen2 are those that the published models were trained with (M-RoPE). transformers
5.23 leaves them out, so the reference is given them.
"""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from headrace_common.sampling.params import SamplingParams
from headrace_common.sampling.pooling import MAX_VECTORS_SIZE, PoolingParams
from headrace_engine import LLM
from headrace_engine.core.errors import CheckpointError, ConfigError, RequestError
from headrace_engine.core.pooler_config import PoolerConfig, PoolingType
from headrace_engine.core.request import EngineRequest
from headrace_engine.engine.engine import Engine
from headrace_testing.draft_heads import change_config
from headrace_testing.engines import cpu_backends, engine_config, make_runner
from headrace_testing.image_prompts import ImageRequests, Prompt, noise, text
from headrace_testing.late_interaction import (
    IMAGE_TOKENS,
    NAMES,
    SIZE,
    Reference,
    save_late_interaction,
)

ATOL = RTOL = 1e-4
PICTURE = noise(48, 40)
ASKED: list[Prompt] = [
    (*text(1, 5), PICTURE, *text(2, 4)),
    tuple(text(3, 20)),
    (noise(24, 64, 2), *text(4, 3)),
]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_late_interaction(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def embed(engine: Engine, folder: Path, asked: list[Prompt], size: int) -> list[torch.Tensor]:
    """The vectors [tokens, size] of each prompt."""
    requests = ImageRequests(folder)
    for at, prompt in enumerate(asked):
        ids, images = requests.read(prompt)
        engine.add_request(
            EngineRequest(
                request_id=str(at),
                prompt_token_ids=tuple(ids),
                params=SamplingParams(max_tokens=1),
                seed=0,
                pooling=PoolingParams(dimensions=None if size == SIZE else size),
                images=images,
            )
        )
    found = {}
    while engine.has_work:
        for output in engine.step():
            assert output.embedding is not None
            found[int(output.request_id)] = torch.tensor(array("f", output.embedding))
    return [found[at].view(-1, size) for at in range(len(asked))]


def check(
    folder: Path, reference: Reference, found: list[torch.Tensor], asked: list[Prompt]
) -> None:
    requests = ImageRequests(folder)
    for vectors, prompt in zip(found, asked, strict=True):
        ids, _ = requests.read(prompt)
        picture = next((part for part in prompt if isinstance(part, Image.Image)), None)
        torch.testing.assert_close(vectors, reference.vectors(ids, picture), atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("attention", cpu_backends())
@pytest.mark.parametrize("chunk", [7, 512])
def test_vectors_equal_transformers(
    attention: str, chunk: int, folder: Path, reference: Reference
) -> None:
    options: dict[str, Any] = {"attention_backend": attention, "max_num_batched_tokens": chunk}
    engine = Engine(engine_config(folder, **options), make_runner(folder, **options))
    for _ in range(2):  # no prefix is taken from the first time
        check(folder, reference, embed(engine, folder, ASKED, SIZE), ASKED)


def test_texts_are_embedded_without_the_tower(folder: Path, reference: Reference) -> None:
    options: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0}}
    engine = Engine(engine_config(folder, **options), make_runner(folder, **options))
    check(folder, reference, embed(engine, folder, ASKED[1:2], SIZE), ASKED[1:2])


def test_offline_prompts_have_a_tensor_with_a_row_for_each_token(
    folder: Path, reference: Reference
) -> None:
    llm = LLM(str(folder), dtype="float32", device="cpu", num_blocks=64)
    (token,) = (each for each in IMAGE_TOKENS.values() if llm.get_tokenizer().token_to_id(each))
    page: Any = {"prompt": f"the cat {token} sat", "multi_modal_data": {"image": PICTURE}}
    found = llm.encode([page, "the cat"], pooling_task="token_embed", use_tqdm=False)
    wanted = [
        reference.vectors(output.prompt_token_ids, picture)
        for output, picture in zip(found, (PICTURE, None), strict=True)
    ]
    for output, vectors in zip(found, wanted, strict=True):
        torch.testing.assert_close(output.outputs.data, vectors, atol=ATOL, rtol=RTOL)
    scores = [each.outputs.score for each in llm.score("the cat", [page, "the cat"])]
    compared = reference.processor.score_retrieval([wanted[1]], wanted)[0]
    assert scores == pytest.approx(compared.tolist(), abs=1e-3)
    with pytest.raises(RequestError, match="use encode"):
        llm.embed("the cat", use_tqdm=False)
    with pytest.raises(RequestError, match="use token_embed"):
        llm.encode("the cat", pooling_task="embed", use_tqdm=False)


def test_a_prompt_with_too_many_vectors_is_refused() -> None:
    config = PoolerConfig(size=1024, pooling_type=PoolingType.ALL)
    config.check_prompt(MAX_VECTORS_SIZE // 1024)
    with pytest.raises(RequestError, match="at most 1024 vectors of 1024 numbers"):
        config.check_prompt(MAX_VECTORS_SIZE // 1024 + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "generate"}, "writes no text: set task embed"),
        ({"pooler_config": {"pooling_type": "MEAN"}}, "nothing of that can be set"),
    ],
)
def test_options_of_other_models_are_refused(
    options: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_runner(folder, **options)


def test_a_projection_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = save_late_interaction(tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["embedding_proj_layer.bias"] = torch.zeros(SIZE + 1)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"embedding_proj_layer.bias is of shape \[25\]"):
        make_runner(folder)


@pytest.mark.parametrize("size", [0, "128"])
def test_a_size_that_is_none_is_named(size: object, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    change_config(tmp_path, embedding_dim=size)
    with pytest.raises(ConfigError, match="embedding_dim must be a whole number from 1 to 65536"):
        make_runner(tmp_path)
