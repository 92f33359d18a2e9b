"""The official OpenAI SDK, sync and async, against the gateway over real sockets."""

import asyncio
import re
from pathlib import Path

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from headrace_common.errors import QueueFull
from headrace_gateway.models.loading import load_static
from headrace_gateway.settings import GatewaySettings
from headrace_testing.gateway import ANSWER, MODEL, Gateway, gateway_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="session")


def client_of(gateway: Gateway) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


async def test_sync_chat(gateway: Gateway) -> None:
    def ask() -> str | None:
        with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}]
            )
        return answer.choices[0].message.content

    assert await asyncio.to_thread(ask) == ANSWER


async def test_sync_stream(gateway: Gateway) -> None:
    def ask() -> str:
        with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model=MODEL, prompt="Hi", stream=True, max_tokens=100
            )
            return "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(ask) == ANSWER


async def test_async_chat_with_everything(gateway: Gateway) -> None:
    async with client_of(gateway) as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            ],
            n=2,
            temperature=0.5,
            top_p=0.9,
            seed=7,
            stop=["time"],
            logprobs=True,
            top_logprobs=2,
            presence_penalty=0.1,
            frequency_penalty=0.1,
            logit_bias={"5": -1},
            max_completion_tokens=50,
            user="someone",
            extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
        )

    assert [choice.message.content for choice in answer.choices] == ["Once upon a "] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.usage is not None
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert answer.usage.completion_tokens == 2 * len(logprobs.content)
    request = gateway.engine.submitted[0]
    assert (request.sampling.seed, request.sampling.top_k) == (7, 5)
    assert request.sampling.logit_bias == {5: -1}
    assert request.sampling.stop == ()
    assert gateway.engine.stopped == [(request.request_id, 0), (request.request_id, 1)]


async def test_async_stream_with_usage(gateway: Gateway) -> None:
    async with client_of(gateway) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            n=2,
            stream_options={"include_usage": True},
        )
        texts, usage, roles, reasons = ["", ""], None, [], []
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles += [choice.delta.role] if choice.delta.role else []
                reasons += [choice.finish_reason] if choice.finish_reason else []

    assert texts == [ANSWER, ANSWER]
    assert roles == ["assistant", "assistant"]
    assert reasons == ["stop", "stop"]
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 2
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def test_an_answer_can_be_sent_back_as_history(gateway: Gateway) -> None:
    async with client_of(gateway) as client:
        first = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}]
        )
        message = first.choices[0].message.model_dump()
        second = await client.chat.completions.create(
            model=MODEL,
            messages=[message, {"role": "user", "content": "And?"}],  # type: ignore[list-item]
        )

    assert second.choices[0].message.content == ANSWER


async def test_models_are_listed_and_found(gateway: Gateway) -> None:
    async with client_of(gateway) as client:
        listed = [model.id async for model in client.models.list()]
        found = await client.models.retrieve(MODEL)
        with pytest.raises(NotFoundError) as caught:
            await client.models.retrieve("absent")

    assert listed == [MODEL] == [found.id]
    assert caught.value.code == "model_not_found"


async def test_errors_are_the_sdks_own_kinds(gateway: Gateway) -> None:
    async with client_of(gateway) as client:
        with pytest.raises(BadRequestError) as bad:
            await client.completions.create(model=MODEL, prompt="Hi", temperature=-1)
        gateway.engine.refusal = QueueFull("full", retry_after=3.2)
        with pytest.raises(APIStatusError) as full:
            await client.completions.create(model=MODEL, prompt="Hi")

    assert bad.value.param == "temperature"
    assert full.value.status_code == 503
    assert full.value.response.headers["retry-after"] == "4"


async def test_the_fingerprint_is_that_of_the_model_and_the_server(gateway: Gateway) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
    async with client_of(gateway) as client:
        chat = await client.chat.completions.create(model=MODEL, messages=messages)
        text = await client.completions.create(model=MODEL, prompt="Hi")
        chunks = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        streamed = {chunk.system_fingerprint async for chunk in chunks}

    fingerprint = chat.system_fingerprint
    assert fingerprint is not None and re.fullmatch("fp_[0-9a-f]{10}", fingerprint)
    assert {text.system_fingerprint} == streamed == {fingerprint}


async def test_another_tokenizer_has_another_fingerprint(tmp_path: Path) -> None:
    folder = gateway_checkpoint(tmp_path)
    settings = GatewaySettings(model=str(folder))
    (before,) = load_static(settings).values()
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (after,) = load_static(settings).values()

    assert before.system_fingerprint != after.system_fingerprint
