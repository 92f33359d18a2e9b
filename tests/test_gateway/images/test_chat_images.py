"""Images in chats, with the SDKs of OpenAI and Anthropic, and what engines are asked then."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from headrace_common.wire.images import image_digest
from headrace_gateway.limits.api_keys import KeyFile
from headrace_testing.api_keys import KeyBook
from headrace_testing.gateway import ANSWER, MODEL, Gateway, prompt_of, serve
from headrace_testing.images import (
    IMAGE_TOKEN,
    KINDS,
    data_url,
    image_part,
    picture,
    write_vision_checkpoint,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL, WIDE = picture(56, 56), picture(112, 56)
START, END = "<|vision_start|>", "<|vision_end|>"


def shown(tokens: int) -> str:
    return START + IMAGE_TOKEN * tokens + END


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("vision"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def serving(folder: Path) -> AsyncIterator[Gateway]:
    async with serve(folder, max_images=4) as running:
        yield running


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


async def test_openais_sdk_sends_an_image(vision: Gateway) -> None:
    async with AsyncOpenAI(base_url=f"{vision.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is"},
                        {
                            "type": "image_url",
                            "image_url": {"url": data_url(SMALL), "detail": "high"},
                        },
                        {"type": "text", "text": "this?"},
                    ],
                }
            ],
        )

    (request,) = vision.engine.submitted
    assert answer.choices[0].message.content == ANSWER
    assert f"What is{shown(4)}this?" in prompt_of(vision)
    (image,) = request.images
    assert (image.length, image.grid) == (4, (1, 4, 4))
    assert image.digest == image_digest(SMALL, b"")
    assert image.data is not None and image.data.encoded == SMALL
    placeholder = vision.engine.tokenizer.token_to_id(IMAGE_TOKEN)
    assert set(request.prompt_token_ids[image.start : image.end]) == {placeholder}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)


async def test_anthropics_sdk_sends_images_also_in_results_of_tools(vision: Gateway) -> None:
    def block(encoded: bytes) -> Any:
        data = data_url(encoded).partition(",")[2]
        source = {"type": "base64", "media_type": "image/png", "data": data}
        return {"type": "image", "source": source}

    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [block(WIDE)]}
    messages: Any = [
        {"role": "user", "content": [block(SMALL), text_part("Look twice.")]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    async with AsyncAnthropic(base_url=vision.url, api_key="none") as client:
        counted = await client.messages.count_tokens(model=MODEL, messages=messages)
        answer = await client.messages.create(model=MODEL, max_tokens=100, messages=messages)

    (request,) = vision.engine.submitted
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == (
        counted.input_tokens
    )
    assert counted.input_tokens == len(request.prompt_token_ids)
    assert f"user\n{shown(4)}Look twice." in prompt_of(vision)
    assert f"tool\n{shown(8)}" in prompt_of(vision)
    assert [image.grid for image in request.images] == [(1, 4, 4), (1, 4, 8)]


async def test_responses_take_images(vision: Gateway) -> None:
    async with AsyncOpenAI(base_url=f"{vision.url}/v1", api_key="none") as client:
        parts: Any = [
            {"type": "input_text", "text": "And"},
            {"type": "input_image", "image_url": data_url(SMALL), "detail": "auto"},
        ]
        answer = await client.responses.create(
            model=MODEL,
            input=[{"role": "user", "content": parts}],
            instructions="Look.",
            store=False,
        )

    assert answer.output_text == ANSWER
    assert f"system\nLook.<|im_end|>\n<|im_start|>user\nAnd{shown(4)}" in prompt_of(vision)
    assert len(vision.engine.submitted[-1].images) == 1


async def test_system_prompts_may_have_images(vision: Gateway) -> None:
    system = {"role": "system", "content": [image_part(WIDE), text_part("is the map.")]}

    answer = await vision.chat(messages=[system, *user(text_part("Where am I?"))])

    assert answer.status_code == 200, answer.text
    assert f"system\n{shown(8)}is the map." in prompt_of(vision)


@pytest.mark.parametrize("kind", KINDS)
async def test_each_format_is_read(vision: Gateway, kind: str) -> None:
    answer = await vision.chat(messages=user(image_part(picture(56, 84, kind))))

    assert answer.status_code == 200, answer.text
    assert vision.engine.submitted[-1].images[0].grid == (1, 6, 4)


async def test_a_placeholder_that_a_user_writes_is_text(vision: Gateway) -> None:
    answer = await vision.chat(messages=user(text_part(IMAGE_TOKEN), image_part(SMALL)))

    assert answer.status_code == 200, answer.text
    (image,) = vision.engine.submitted[-1].images
    ids = vision.engine.submitted[-1].prompt_token_ids
    assert ids.count(vision.engine.tokenizer.token_to_id(IMAGE_TOKEN) or -1) == image.length == 4


async def test_prompts_with_images_are_counted_by_tokenize(vision: Gateway) -> None:
    body = {"model": MODEL, "messages": user(image_part(WIDE))}
    without = {"model": MODEL, "messages": user(text_part(""))}

    counted = (await vision.http.post("/tokenize", json=body)).json()["count"]
    plain = (await vision.http.post("/tokenize", json=without)).json()["count"]

    assert counted == plain + 8 + 2


async def test_models_tell_what_they_read(vision: Gateway, gateway: Gateway) -> None:
    for server, read in ((vision, ["text", "image"]), (gateway, ["text"])):
        (listed,) = (await server.http.get("/v1/models")).json()["data"]
        named = (await server.http.get(f"/v1/models/{MODEL}")).json()
        assert listed == named
        assert listed["architecture"] == {"input_modalities": read}


async def test_a_model_that_reads_text_refuses_images_by_name(gateway: Gateway) -> None:
    answer = await gateway.chat(messages=user(text_part("a"), image_part(SMALL)))

    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert error["message"].endswith(f"the model {MODEL} reads text only.")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,????", "not valid base64"),
        ("data:text/plain;base64,QQ==", "a data: URL is data:image/png;base64,"),
        ("data:image/png,QQ==", "a data: URL is data:image/png;base64,"),
        ("data:" + "x" * 1000, "a data: URL is data:image/png;base64,"),
        (data_url(b"not an image"), "it is not a PNG, JPEG, WebP or GIF"),
        (data_url(picture(300, 300)[:-60]), "it is damaged"),
        (data_url(picture(2, 402)), "one side is over 200 times as long"),
        ("http://127.0.0.1/secret.png", "this server fetches no images"),
        ("file:///etc/passwd", "this server fetches no images"),
    ],
)
async def test_an_image_that_cannot_be_read_is_named(
    vision: Gateway, url: str, reason: str
) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}

    answer = await vision.chat(messages=user(image_part(SMALL), part))

    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["code"] == "invalid_image"
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert reason in error["message"]
    assert not vision.engine.submitted


async def test_errors_name_the_fields_of_the_api_that_was_used(vision: Gateway) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "QQ=="}
    block = {"type": "image", "source": source}
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": data_url(b"x")}]}

    by_messages = await vision.http.post("/v1/messages", json=body)
    by_responses = await vision.http.post("/v1/responses", json={"model": MODEL, "input": [item]})

    assert by_messages.status_code == by_responses.status_code == 400
    message = by_messages.json()["error"]["message"]
    assert message.startswith("messages[0].content[0].source.data: ")
    assert by_responses.json()["error"]["param"] == "input[0].content[0].image_url"


async def test_too_many_images_are_refused_before_they_are_decoded(vision: Gateway) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}

    answer = await vision.chat(messages=user(*[part] * 4000))

    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["code"] == "too_many_images"
    assert error["param"] == "messages[0].content[4].image_url.url"


async def test_images_count_as_tokens_of_the_context(vision: Gateway) -> None:
    large = picture(28 * 16, 28 * 4)

    answer = await vision.chat(messages=user(*[image_part(large)] * 4), max_tokens=300)

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_an_answer_does_not_take_images(vision: Gateway) -> None:
    content = [{"type": "input_image", "image_url": data_url(SMALL)}]
    body = {"model": MODEL, "input": [{"role": "assistant", "content": content}]}

    answer = await vision.http.post("/v1/responses", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[0].content[0].type"


async def test_equal_images_of_two_tenants_have_different_digests(
    folder: Path, tmp_path: Path
) -> None:
    book = KeyBook(tmp_path / "keys.yaml")
    keys = [book.add(name, tenant=f"team-{name}") for name in ("a", "b")]
    key_file = KeyFile(book.path)
    key_file.start()
    try:
        async with serve(folder, keys=key_file) as gateway:
            for key in [*keys, keys[0]]:
                answer = await gateway.http.post(
                    "/v1/chat/completions",
                    json={"model": MODEL, "messages": user(image_part(SMALL))},
                    headers={"authorization": f"Bearer {key}"},
                )
                assert answer.status_code == 200, answer.text
            first, second, again = (r.images[0].digest for r in gateway.engine.submitted)
    finally:
        await key_file.close()

    assert first == again != second
