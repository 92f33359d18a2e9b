"""Embeddings of messages with images, in vLLM's form, and what engines are asked then."""

import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types import CreateEmbeddingResponse

from headrace_common.wire.images import image_digest
from headrace_common.wire.messages import GenerateRequest
from headrace_gateway.queue_client.client import Delta
from headrace_testing.gateway import MODEL, Gateway, prompt_of, serve
from headrace_testing.images import IMAGE_TOKEN, image_part, picture, write_vision_checkpoint
from headrace_testing.tokenizers import byte_level_tokenizer, write_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL, WIDE = picture(56, 56), picture(112, 56)
PLACE = "<|vision_start|>{}<|vision_end|>"


def vectors(request: GenerateRequest) -> Sequence[Delta]:
    assert request.pooling is not None
    packed = struct.pack("<2f", 0.5, 0.25)
    return [Delta(choice=0, token_ids=(), finish_reason="stop", embedding=packed)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder: Path = write_vision_checkpoint(tmp_path_factory.mktemp("vision"))
    async with serve(folder, max_images=2) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def vision(serving: Gateway) -> Gateway:
    serving.engine.reset()
    serving.engine.script = vectors
    return serving


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def serving_clip(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("clip")
    config = {
        "model_type": "clip",
        "text_config": {"max_position_embeddings": 16, "vocab_size": 512},
        "vision_config": {"image_size": 16, "patch_size": 4},
    }
    write_checkpoint(folder, byte_level_tokenizer(), config=config)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "x"}')
    async with serve(folder) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def clip(serving_clip: Gateway) -> Gateway:
    serving_clip.engine.reset()
    serving_clip.engine.script = vectors
    return serving_clip


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def test_messages_are_one_input_with_images(vision: Gateway) -> None:
    messages = user(image_part(SMALL), text_part("A mill."), image_part(WIDE))
    async with AsyncOpenAI(base_url=f"{vision.url}/v1", api_key="none") as client:
        answer = await client.post(
            "/embeddings",
            cast_to=CreateEmbeddingResponse,
            body={"model": MODEL, "messages": messages, "encoding_format": "float"},
        )

    (request,) = vision.engine.submitted
    assert answer.data[0].embedding == [0.5, 0.25] and len(answer.data) == 1
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    first, second = (PLACE.format(IMAGE_TOKEN * tokens) for tokens in (4, 8))
    assert prompt_of(vision).endswith(f"user\n{first}A mill.{second}<|im_end|>\n")
    assert [image.digest for image in request.images] == [
        image_digest(each, b"") for each in (SMALL, WIDE)
    ]
    assert request.images[0].data is not None and request.images[0].data.encoded == SMALL


async def test_the_prompt_is_made_as_asked(vision: Gateway) -> None:
    body = {"model": MODEL, "messages": user(text_part("A mill."))}

    answer = await vision.http.post("/v1/embeddings", json={**body, "add_generation_prompt": True})

    assert answer.status_code == 200, answer.text
    assert prompt_of(vision).endswith("assistant\n")


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({}, "input", "either input or messages"),
        ({"input": "a", "messages": user(text_part("a"))}, "input", "either input or messages"),
        ({"messages": []}, "messages", "at least 1"),
        (
            {"messages": user(*[image_part(SMALL)] * 3)},
            "messages[0].content[2].image_url.url",
            "over the limit of 2",
        ),
        (
            {"messages": user(image_part(b"no image"), text_part("a"))},
            "messages[0].content[0].image_url.url",
            "not a PNG",
        ),
        ({"messages": user(text_part("word " * 6000))}, "messages", "context length"),
    ],
)
async def test_a_fault_is_named(
    vision: Gateway, fields: dict[str, Any], param: str, reason: str
) -> None:
    answer = await vision.http.post("/v1/embeddings", json={"model": MODEL, **fields})

    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"] == param and reason in error["message"]
    assert not vision.engine.submitted


async def test_a_model_of_texts_and_images_embeds_either(tmp_path: Path, clip: Gateway) -> None:
    text = user(text_part("A "), text_part("mill."))
    for messages in (user(image_part(SMALL)), text, [{"role": "user", "content": "A mill."}]):
        answer = await clip.http.post("/v1/embeddings", json={"model": MODEL, "messages": messages})
        assert answer.status_code == 200, answer.text
    as_input = await clip.http.post("/v1/embeddings", json={"model": MODEL, "input": "A mill."})

    image, first, second, third = clip.engine.submitted
    assert as_input.status_code == 200
    assert image.prompt_token_ids == (0,) * 16
    assert [(each.start, each.length, each.grid) for each in image.images] == [(0, 16, (1, 4, 4))]
    assert first.prompt_token_ids == second.prompt_token_ids == third.prompt_token_ids
    assert not first.images


@pytest.mark.parametrize(
    "parts",
    [
        (image_part(SMALL), text_part("A mill.")),
        (image_part(SMALL), image_part(SMALL)),
        (text_part(""),),
    ],
)
async def test_such_a_model_embeds_nothing_else(clip: Gateway, parts: tuple[Any, ...]) -> None:
    body = {"model": MODEL, "messages": user(*parts)}

    answer = await clip.http.post("/v1/embeddings", json=body)

    assert answer.status_code == 400
    assert "embeds one image or one text" in answer.json()["error"]["message"]
    assert not clip.engine.submitted


async def test_such_a_model_has_no_chats(clip: Gateway) -> None:
    answer = await clip.chat(messages=user(image_part(SMALL)))

    assert answer.status_code == 400
    assert not clip.engine.submitted


async def test_a_model_that_reads_text_refuses_images_by_name(gateway: Gateway) -> None:
    body = {"model": MODEL, "messages": user(image_part(SMALL))}

    answer = await gateway.http.post("/v1/embeddings", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_parameter"
