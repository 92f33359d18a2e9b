"""Embeddings of prompts with images equal transformers' hidden states: in chunks, with other
prompts in a step, and with prefix hits."""

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from headrace_common.sampling.params import SamplingParams
from headrace_common.sampling.pooling import PoolingParams
from headrace_engine import LLM
from headrace_engine.core.errors import RequestError
from headrace_engine.core.request import EngineRequest
from headrace_engine.engine.engine import Engine
from headrace_testing.engines import engine_config, make_runner
from headrace_testing.image_prompts import IMAGE_TOKEN, ImagePrompts, Prompt, noise, save_chat_model
from headrace_testing.image_prompts import text as words

CheckpointMaker = Callable[[str], Path]
NAMES = (
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
    "llava-onevision",
    "gemma3-multimodal",
    "gemma4-multimodal",
    "gemma4-small",
)
WHOLE = {"gemma3-multimodal": 18, "gemma4-multimodal": 72}

ATOL = RTOL = 1e-4


def embed(engine: Engine, prompts: ImagePrompts, asked: list[Prompt]) -> dict[str, torch.Tensor]:
    for at, prompt in enumerate(asked):
        ids, images = prompts.read(prompt)
        params, pooling = SamplingParams(max_tokens=1), PoolingParams()
        engine.add_request(
            EngineRequest(
                request_id=str(at),
                prompt_token_ids=tuple(ids),
                params=params,
                seed=0,
                pooling=pooling,
                images=images,
            )  # fmt: skip
        )
    found = {}
    while engine.has_work:
        for output in engine.step():
            assert output.embedding is not None
            found[output.request_id] = torch.tensor(array("f", output.embedding))
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pooling", ["LAST", "MEAN"])
def test_vectors_equal_transformers(name: str, pooling: str, checkpoint: CheckpointMaker) -> None:
    folder = checkpoint(name)
    options: dict[str, Any] = {
        "task": "embed",
        "pooler_config": {"pooling_type": pooling},
        "max_num_batched_tokens": WHOLE.get(name, 7),
    }
    engine = Engine(engine_config(folder, **options), make_runner(folder, **options))
    prompts = ImagePrompts(folder)
    asked: list[Prompt] = [
        (*words(1, 5), noise(48, 40), *words(2, 4)),
        tuple(words(3, 20)),
        (*words(1, 5), noise(48, 40), *words(4, 6), noise(16, 24, 1), *words(5, 2)),
    ]
    expected = [prompts.states(prompt) for prompt in asked]
    for _ in range(2):  # then from the prefix cache, if it may be used
        found = embed(engine, prompts, asked)
        for at, states in enumerate(expected):
            wanted = states[-1] if pooling == "LAST" else states.mean(dim=0)
            torch.testing.assert_close(
                found[str(at)], F.normalize(wanted, dim=0), atol=ATOL, rtol=RTOL
            )


def test_offline_prompts_have_images(tmp_path: Path) -> None:
    folder, picture = save_chat_model(tmp_path / "m", "qwen3-vl"), noise(32, 24)
    llm = LLM(str(folder), task="embed", dtype="float32", device="cpu", num_blocks=64)
    prompt: Any = {"prompt": f"the cat {IMAGE_TOKEN} sat", "multi_modal_data": {"image": picture}}
    (with_image,) = llm.embed(prompt, use_tqdm=False)
    prompts = ImagePrompts(folder)
    ids = llm.get_tokenizer().encode(prompt["prompt"])
    whole: Prompt = [picture if each == prompts.image_token else each for each in ids]
    wanted = F.normalize(prompts.states(whole)[-1], dim=0)
    torch.testing.assert_close(
        torch.tensor(with_image.outputs.embedding), wanted, atol=ATOL, rtol=RTOL
    )
    with pytest.raises(RequestError, match="cannot cut a prompt with images"):
        llm.embed(prompt, use_tqdm=False, truncate_prompt_tokens=3)
