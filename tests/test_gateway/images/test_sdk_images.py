"""The official SDKs send images in every form and place that the doors accept."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from headrace_gateway.images.fetching import Fetcher
from headrace_testing.gateway import ANSWER, MODEL, Gateway, prompt_of, serve
from headrace_testing.images import (
    IMAGE_TOKEN,
    KINDS,
    data_url,
    picture,
    write_vision_checkpoint,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

Ask = Callable[[Gateway, Any], Awaitable[str]]
SHOWN = "<|vision_start|>" + IMAGE_TOKEN * 4 + "<|vision_end|>"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder: Path = write_vision_checkpoint(tmp_path_factory.mktemp("vision"))
    async with serve(folder) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def address(vision: Gateway, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The URL of a picture on a host that the gateway may fetch from."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = picture()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    images = vision.app.state.services.pipeline.images
    fetcher = Fetcher((f"127.0.0.1:{port}",), 10_000, permits=lambda _: True)
    monkeypatch.setattr(images, "_fetcher", fetcher)
    async with server:
        yield f"http://127.0.0.1:{port}/cat.png"


def _openai(gateway: Gateway) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


def _anthropic(gateway: Gateway) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0)


# Chat completions: where an image may be


def _part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}


async def _chat(gateway: Gateway, messages: Any) -> str:
    async with _openai(gateway) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
    return answer.choices[0].message.content or ""


async def chat(gateway: Gateway, url: str) -> str:
    return await _chat(gateway, [{"role": "user", "content": [_part(url)]}])


async def chat_of_a_developer(gateway: Gateway, url: str) -> str:
    developer = {"role": "developer", "content": [_part(url)]}
    return await _chat(gateway, [developer, {"role": "user", "content": "What is it?"}])


async def chat_about_a_result(gateway: Gateway, url: str) -> str:
    result = {"role": "tool", "tool_call_id": "c1", "content": [_part(url)]}
    call = {"role": "assistant", "tool_calls": [_call("c1")]}
    return await _chat(gateway, [{"role": "user", "content": "Look."}, call, result])


async def streamed_chat(gateway: Gateway, url: str) -> str:
    messages: Any = [{"role": "user", "content": [_part(url)]}]
    async with _openai(gateway) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


# Responses


def _input_image(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, "detail": "low"}


async def _respond(gateway: Gateway, items: Any) -> str:
    async with _openai(gateway) as client:
        counted = await client.responses.input_tokens.count(model=MODEL, input=items)
        answer = await client.responses.create(model=MODEL, input=items, store=False)
    assert answer.usage is not None and answer.usage.input_tokens == counted.input_tokens
    return answer.output_text


async def response(gateway: Gateway, url: str) -> str:
    return await _respond(gateway, [{"role": "user", "content": [_input_image(url)]}])


async def response_about_a_result(gateway: Gateway, url: str) -> str:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": [_input_image(url)]}
    return await _respond(gateway, [{"role": "user", "content": "Look."}, call, result])


async def streamed_response(gateway: Gateway, url: str) -> str:
    items: Any = [{"type": "message", "role": "user", "content": [_input_image(url)]}]
    async with _openai(gateway) as client:
        async with client.responses.stream(model=MODEL, input=items, store=False) as stream:
            return (await stream.get_final_response()).output_text


# Messages


def _source(url: str) -> dict[str, Any]:
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    head, _, data = url.partition(";base64,")
    return {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}


def _block(url: str) -> dict[str, Any]:
    return {"type": "image", "source": _source(url), "cache_control": {"type": "ephemeral"}}


async def message(gateway: Gateway, url: str) -> str:
    messages: Any = [{"role": "user", "content": [_block(url)]}]
    async with _anthropic(gateway) as client:
        counted = await client.messages.count_tokens(model=MODEL, messages=messages)
        answer = await client.messages.create(model=MODEL, max_tokens=50, messages=messages)
    cached = answer.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == answer.usage.input_tokens + cached
    return answer.content[0].text if answer.content[0].type == "text" else ""


async def beta_message(gateway: Gateway, url: str) -> str:
    messages: Any = [{"role": "user", "content": [_block(url)]}]
    async with _anthropic(gateway) as client:
        answer = await client.beta.messages.create(model=MODEL, max_tokens=50, messages=messages)
    return answer.content[0].text if answer.content[0].type == "text" else ""


async def streamed_message(gateway: Gateway, url: str) -> str:
    messages: Any = [{"role": "user", "content": [_block(url)]}]
    async with _anthropic(gateway) as client:
        async with client.messages.stream(model=MODEL, max_tokens=50, messages=messages) as stream:
            return await stream.get_final_text()


FORMS: tuple[Ask, ...] = (
    *(chat, chat_of_a_developer, chat_about_a_result, streamed_chat),
    *(response, response_about_a_result, streamed_response),
    *(message, beta_message, streamed_message),
)
each_form = pytest.mark.parametrize("ask", FORMS, ids=[form.__name__ for form in FORMS])


@each_form
@pytest.mark.parametrize("kind", KINDS)
async def test_an_image_in_the_request_is_shown_to_the_model(
    vision: Gateway, ask: Ask, kind: str
) -> None:
    assert await ask(vision, data_url(picture(kind=kind), kind.lower())) == ANSWER

    assert SHOWN in prompt_of(vision)
    (image,) = vision.engine.submitted[-1].images
    assert image.data is not None and image.data.encoded == picture(kind=kind)


@each_form
async def test_an_image_at_an_allowed_url_is_shown_to_the_model(
    vision: Gateway, address: str, ask: Ask
) -> None:
    assert await ask(vision, address) == ANSWER

    assert SHOWN in prompt_of(vision)
    (image,) = vision.engine.submitted[-1].images
    assert image.data is not None and image.data.encoded == picture()
