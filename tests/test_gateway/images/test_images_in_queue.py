"""Images on their way through the real queue to an engine, and after their requests."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from headrace_common.protocol.base import QueueLimits
from headrace_common.wire import keys
from headrace_gateway.http.app import AppDependencies, create_app
from headrace_gateway.models.loading import load_static
from headrace_gateway.models.models import Models
from headrace_gateway.queue_client.client import GenerationClient
from headrace_gateway.settings import GatewaySettings
from headrace_testing.backends import MODEL, OverRedis
from headrace_testing.fake_engine import FakeEngine
from headrace_testing.gateway import running
from headrace_testing.images import data_url, image_part, picture, write_vision_checkpoint
from headrace_testing.kept_gateway import serve_kept
from headrace_testing.waiting import eventually

LIMITS = QueueLimits(max_tenant_images=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("vision"))


@pytest.fixture
async def http(over_redis: OverRedis, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = GatewaySettings(model=str(folder), served_model_name=MODEL, port=0, drain_timeout=0)
    queue = over_redis.gateway()
    client = GenerationClient(queue, LIMITS)
    await client.start()
    deps = AppDependencies(served=Models(load_static(settings)), client=client, queue=queue)
    async with running(create_app(settings, deps), settings) as (_, port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            yield http
    await client.close()


@pytest.fixture
async def engine(over_redis: OverRedis) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(over_redis.engine(), MODEL, token_delay=0.001).running() as engine:
        yield engine


async def ask(http: httpx.AsyncClient, *pictures: bytes) -> httpx.Response:
    content = [*map(image_part, pictures), {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    return await http.post("/v1/chat/completions", json=body)


async def stored(over_redis: OverRedis) -> list[bytes]:
    found: list[bytes] = await over_redis.client.command("KEYS", "im:*")
    return found


async def test_64_requests_about_a_picture_store_it_once(
    http: httpx.AsyncClient, engine: FakeEngine, over_redis: OverRedis
) -> None:
    engine.freeze()
    asking = [asyncio.create_task(ask(http, picture())) for _ in range(64)]
    observer = over_redis.gateway("observer")

    async def all_wait() -> bool:
        return (await observer.depth(MODEL)).waiting == 64

    await eventually(all_wait)
    assert len(await stored(over_redis)) == 1
    engine.thaw()
    answers = await asyncio.gather(*asking)

    assert {answer.status_code for answer in answers} == {200}
    assert engine.images == [picture()] * 64


async def test_an_image_is_soon_dropped_once_its_requests_have_ended(
    http: httpx.AsyncClient, engine: FakeEngine, over_redis: OverRedis
) -> None:
    answer = await ask(http, picture())
    assert answer.status_code == 200, answer.text

    async def expires_soon() -> bool:
        (name,) = await stored(over_redis)
        return bool(await over_redis.client.command("PTTL", name) <= keys.ENDED_TTL_MS)

    await eventually(expires_soon)


async def test_a_request_is_taken_over_with_its_image(
    http: httpx.AsyncClient, over_redis: OverRedis
) -> None:
    first = FakeEngine(over_redis.engine("first"), MODEL, token_delay=0.05, beat_interval=0.05)
    running_first = asyncio.create_task(first.run())
    body = {
        "messages": [{"role": "user", "content": [image_part(picture())]}],
        "max_tokens": 200,
    }
    asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))

    async def has_begun() -> bool:
        return any(request.choices[0].token_ids for request in first.active.values())

    await eventually(has_begun)
    first.drain()
    second = FakeEngine(over_redis.engine("second"), MODEL, token_delay=0.0)
    running_second = asyncio.create_task(second.run())
    answer = await asking
    for task in (running_first, running_second):
        task.cancel()
    await asyncio.gather(running_first, running_second, return_exceptions=True)

    assert answer.status_code == 200, answer.text
    assert first.images == second.images == [picture()]


async def test_the_images_of_a_tenant_are_bounded(
    http: httpx.AsyncClient, over_redis: OverRedis
) -> None:
    answer = await ask(http, *(picture(shade=shade) for shade in range(3)))

    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "tenant_images_full"
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_stored_conversation_has_its_images(folder: Path) -> None:
    async with serve_kept(folder) as kept:
        kept.say("A square.", "Yes.")
        async with AsyncOpenAI(base_url=f"{kept.url}/v1", api_key="none") as client:
            image: Any = {"type": "input_image", "image_url": data_url(picture())}
            first = await client.responses.create(
                model=MODEL, input=[{"role": "user", "content": [image]}]
            )
            second = await client.responses.create(
                model=MODEL, input="Sure?", previous_response_id=first.id
            )

        assert second.output_text == "Yes."
        assert kept.engine.images == [picture()] * 2
        assert [len(request.images) for request in kept.requests] == [1, 1]


async def test_a_request_with_a_key_is_answered_again_without_its_image(folder: Path) -> None:
    async with serve_kept(folder) as kept:
        kept.say("A square.")
        body = {"messages": [{"role": "user", "content": [image_part(picture())]}]}
        headers = {"idempotency-key": "k1"}
        answers = [
            await kept.http.post("/v1/chat/completions", json=body, headers=headers)
            for _ in range(2)
        ]

        assert {answer.status_code for answer in answers} == {200}, answers[0].text
        assert kept.engine.images == [picture()]
