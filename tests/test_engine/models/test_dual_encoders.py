"""Models that embed texts and images into one space: vectors equal transformers' features, texts
and images in one step, and an image of several requests is encoded once."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from headrace_common.images.layout import expand
from headrace_common.sampling.params import SamplingParams
from headrace_common.sampling.pooling import PoolingParams
from headrace_common.wire.images import image_digest
from headrace_engine import LLM
from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.core.errors import RequestError
from headrace_engine.core.images import PromptImage
from headrace_engine.core.request import EngineRequest
from headrace_engine.engine.engine import Engine
from headrace_engine.models.vision.image_reader import ImageReader, read_format
from headrace_testing.dual_encoders import EOS, NAMES, POSITIONS, Input, features, save_dual_encoder
from headrace_testing.engines import engine_config, make_runner
from headrace_testing.image_prompts import noise

ATOL, RTOL = 1e-5, 1e-4
INPUTS: list[Input] = [
    [1, 9, 4, EOS],
    noise(24, 16),
    [1, *range(30, 30 + POSITIONS - 2), EOS],
    noise(9, 60, 1),
    noise(24, 16),
    [1, 77, EOS],
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_dual_encoder(tmp_path_factory.mktemp(name), name) for name in NAMES}


def requests(folder: Path) -> list[EngineRequest]:
    form = read_format(load_checkpoint(str(folder)))
    assert form is not None and form.alone
    reader, made = ImageReader(folder, form), []
    for at, one in enumerate(INPUTS):
        ids: list[int]
        images: tuple[PromptImage, ...] = ()
        if isinstance(one, Image.Image):
            found = [(image_digest(one.tobytes(), b""), form.layout(*one.size))]
            ids, spans = expand({-1}, [-1], found)
            images = reader.read(spans, [one])
        else:
            ids = one
        made.append(
            EngineRequest(
                request_id=str(at),
                prompt_token_ids=tuple(ids),
                params=SamplingParams(max_tokens=1),
                seed=0,
                pooling=PoolingParams(),
                images=images,
            )
        )
    return made


@pytest.mark.parametrize("budget", [512, POSITIONS])
@pytest.mark.parametrize("name", NAMES)
def test_vectors_equal_transformers(name: str, budget: int, folders: dict[str, Path]) -> None:
    folder = folders[name]
    options: dict[str, Any] = {"max_num_batched_tokens": budget, "attention_backend": "auto"}
    engine = Engine(engine_config(folder, **options), make_runner(folder, **options))
    for request in requests(folder):
        engine.add_request(request)
    found = {}
    while engine.has_work:
        for output in engine.step():
            assert output.embedding is not None
            found[output.request_id] = torch.tensor(array("f", output.embedding))
    vectors = [found[str(at)] for at in range(len(INPUTS))]
    for one, vector in zip(INPUTS, vectors, strict=True):
        torch.testing.assert_close(vector, features(folder, name, one), atol=ATOL, rtol=RTOL)
    assert float(vectors[0] @ vectors[5]) < 0.999 and float(vectors[1] @ vectors[3]) < 0.999
    assert engine.stats().images_encoded == 2


@pytest.mark.parametrize("name", NAMES)
def test_offline_prompts_are_an_image_or_a_text(name: str, folders: dict[str, Path]) -> None:
    llm, picture = LLM(str(folders[name]), dtype="float32", device="cpu"), noise(24, 16)
    data = {"image": picture}
    prompts: Any = [{"prompt": "", "multi_modal_data": data}, {"prompt_token_ids": INPUTS[0]}]
    found = llm.embed(prompts, use_tqdm=False)
    for output, one in zip(found, (picture, INPUTS[0]), strict=True):
        wanted = features(folders[name], name, one)
        torch.testing.assert_close(
            torch.tensor(output.outputs.embedding), wanted, atol=ATOL, rtol=RTOL
        )
    both: Any = {"prompt": "the cat", "multi_modal_data": data}
    with pytest.raises(RequestError, match="embeds an image or a text"):
        llm.embed(both, use_tqdm=False)


@pytest.mark.parametrize("name", NAMES)
def test_texts_alone_need_no_tower(name: str, folders: dict[str, Path]) -> None:
    llm = LLM(str(folders[name]), dtype="float32", device="cpu", limit_mm_per_prompt={"image": 0})
    text = INPUTS[0]
    assert isinstance(text, list)
    (found,) = llm.embed({"prompt_token_ids": text}, use_tqdm=False)
    wanted = features(folders[name], name, text)
    torch.testing.assert_close(torch.tensor(found.outputs.embedding), wanted, atol=ATOL, rtol=RTOL)
    with pytest.raises(RequestError, match="reads no images"):
        llm.llm_engine.model.engine.add_request(requests(folders[name])[1])
