"""Requests that outlive their connection, through two gateways on one queue, with a fake engine."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from headrace_common.protocol.base import AdmitState, QueueLimits
from headrace_gateway.limits.work import INLINE_SIZE
from headrace_gateway.models.models import Models
from headrace_gateway.resumable import idempotency
from headrace_testing.backends import MODEL, Backend
from headrace_testing.fake_engine import FakeEngine, is_one_history
from headrace_testing.gateway import Gateway, events
from headrace_testing.gateway_group import GatewayGroup
from headrace_testing.resuming import ReceivedStream, read
from headrace_testing.waiting import eventually

KEY = {"idempotency-key": "the key"}
RESUMABLE = {"x-resumable": "true"}
in_memory = pytest.mark.parametrize("backend", ["memory"], indirect=True)
LONG: Mapping[str, Any] = {"prompt": [5, 6], "max_tokens": 100, "return_token_ids": True}


@pytest.fixture
async def group(backend: Backend, served: Models, window: float) -> GatewayGroup:
    return GatewayGroup(backend, served, window)


@pytest.fixture
async def gateways(group: GatewayGroup) -> AsyncIterator[list[httpx.AsyncClient]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(group.gateway(name)) for name in ("g1", "g2")]


@pytest.fixture
def engine(backend: Backend) -> FakeEngine:
    return FakeEngine(backend.engine(), MODEL, token_delay=0.001, beat_interval=0.2)


@pytest.fixture(autouse=True)
async def engine_task(engine: FakeEngine) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(engine.run())
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def break_stream_after(
    http: httpx.AsyncClient, headers: Mapping[str, str], count: int, **fields: Any
) -> ReceivedStream:
    """Reads a stream as a client that disconnects after `count` events."""
    received = ReceivedStream()
    gone = asyncio.Event()

    def seen(stream: ReceivedStream) -> None:
        if len(stream.events) >= count:
            gone.set()

    async def listen() -> None:
        body = {**LONG, "stream": True, **fields}
        async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            await read(answer, received, seen)

    listening = asyncio.create_task(listen())
    await gone.wait()
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    return received


async def read_rest(http: httpx.AsyncClient, received: ReceivedStream) -> ReceivedStream:
    assert received.last_id is not None
    url = f"/v1/requests/{received.request_id}/events"
    answer = await http.get(url, headers={"last-event-id": received.last_id})
    assert answer.status_code == 200, answer.text
    for block in answer.text.split("\n\n"):
        received.take(block)
    return received


def tokens_of(received: ReceivedStream, choice: int = 0) -> list[int]:
    chosen = [c for e in received.events for c in e["choices"] if c["index"] == choice]
    return [token for each in chosen for token in each["token_ids"]]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("where", [0, 1])
async def test_a_broken_stream_continues_at_any_gateway(
    gateways: list[httpx.AsyncClient], engine: FakeEngine, where: int, n: int
) -> None:
    received = await break_stream_after(gateways[0], RESUMABLE, 20, n=n)

    whole = await read_rest(gateways[where], received)

    assert whole.done
    for choice in range(n):
        tokens = tokens_of(whole, choice)
        assert len(tokens) == 100 and is_one_history(choice, tokens)


class JsonWithThreadNames:
    """Replaces the module json, and records the threads that call `dumps`."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def dumps(self, value: object, **options: Any) -> str:
        self.threads.append(threading.current_thread().name)
        return json.dumps(value, **options)


@in_memory
@pytest.mark.parametrize(
    ("path", "fields"),
    [("completions", {"prompt": [5, 6], "max_tokens": 1}), ("embeddings", {"input": [5, 6]})],
)
async def test_large_bodies_are_compared_off_the_event_loop(
    gateways: list[httpx.AsyncClient],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: Mapping[str, Any],
) -> None:
    json_module = JsonWithThreadNames()
    monkeypatch.setattr(idempotency, "json", json_module)
    body = json.dumps({"model": MODEL, **fields}) + INLINE_SIZE * " "
    headers = {**KEY, "content-type": "application/json"}
    answer = await gateways[0].post(f"/v1/{path}", content=body, headers=headers)

    assert answer.status_code == 200, answer.text
    assert len(json_module.threads) == 1 and "MainThread" not in json_module.threads


async def test_the_same_post_with_its_key_continues_the_stream(
    gateways: list[httpx.AsyncClient], engine: FakeEngine
) -> None:
    received = await break_stream_after(gateways[0], KEY, 20)

    assert received.last_id is not None
    answer = await gateways[1].post(
        "/v1/completions",
        json={**LONG, "stream": True},
        headers={**KEY, "last-event-id": received.last_id},
    )
    for block in answer.text.split("\n\n"):
        received.take(block)

    assert (
        received.done and len(tokens_of(received)) == 100 and is_one_history(0, tokens_of(received))
    )


async def test_a_whole_stream_can_be_read_again_after_its_end(
    gateways: list[httpx.AsyncClient], engine: FakeEngine
) -> None:
    body = {**LONG, "stream": True, "stream_options": {"include_usage": True}}
    first = await gateways[0].post("/v1/completions", json=body, headers=RESUMABLE)

    again = await gateways[1].get(first.headers["content-location"] + "/events")

    assert without_comments(again.text) == without_comments(first.text)
    numbered = await gateways[1].get(
        first.headers["content-location"] + "/events", params={"starting_after": 98}
    )
    assert [len(e["choices"]) for e in events(numbered.text)] == [1, 1, 0]
    beyond = await gateways[1].get(
        first.headers["content-location"] + "/events", params={"starting_after": 9999}
    )
    # Keep-alive comments may have begun a stream; then the error is its only event.
    assert re.search(r'"param": ?"starting_after"', beyond.text), beyond.text


def without_comments(text: str) -> list[str]:
    return [line for line in text.split("\n") if not line.startswith(":")]


async def test_a_client_that_saw_the_last_event_gets_only_done(
    gateways: list[httpx.AsyncClient], engine: FakeEngine
) -> None:
    received = await break_stream_after(gateways[0], RESUMABLE, 5, max_tokens=5)

    answer = await gateways[1].get(
        f"/v1/requests/{received.request_id}/events",
        headers={"last-event-id": received.last_id or ""},
    )

    assert answer.text == "data: [DONE]\n\n"


async def test_a_live_stream_is_followed_from_another_gateway(
    gateways: list[httpx.AsyncClient], group: GatewayGroup, engine: FakeEngine
) -> None:
    """Both clients get everything, although the engine sends to one gateway only."""
    body = {**LONG, "max_tokens": 200, "stream": True}

    first, second = await asyncio.gather(
        *(http.post("/v1/completions", json=body, headers=KEY) for http in gateways)
    )

    assert [*events(first.text)] == [*events(second.text)]
    assert engine.active == {} and await group.is_idle()


async def test_a_following_gateway_takes_over_when_the_first_one_is_gone(
    group: GatewayGroup, engine: FakeEngine
) -> None:
    engine.token_delay = 0.005
    async with group.gateway("g2") as other:
        async with group.gateway("g1") as first:
            received = await break_stream_after(first, RESUMABLE, 20, max_tokens=300)
            following = asyncio.create_task(read_rest_by_events(other, received))

            async def followed() -> bool:
                return len(received.events) > 40

            await eventually(followed)
        await following
    assert (
        received.done and len(tokens_of(received)) == 300 and is_one_history(0, tokens_of(received))
    )


async def test_a_stream_survives_the_loss_of_engine_and_gateway_at_once(
    group: GatewayGroup, backend: Backend, engine: FakeEngine, engine_task: "asyncio.Task[None]"
) -> None:
    """Tokens are random: an engine that generated them again would not match the checksum."""
    engine.token_delay = 0.005
    async with group.gateway("g2") as other:
        async with group.gateway("g1") as first:
            received = await break_stream_after(first, RESUMABLE, 30, n=2)
            engine_task.cancel()
            await asyncio.gather(engine_task, return_exceptions=True)
        heir = FakeEngine(
            backend.engine("e2", lease_ms=200), MODEL, token_delay=0.001, beat_interval=0.1, seed=1
        )
        serving = asyncio.create_task(heir.run())
        whole = await read_rest(other, received)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    for choice in range(2):
        tokens = tokens_of(whole, choice)
        assert len(tokens) == 100 and is_one_history(choice, tokens)


async def read_rest_by_events(http: httpx.AsyncClient, received: ReceivedStream) -> None:
    """Reads the rest like `read_rest`, but event by event."""
    assert received.last_id is not None
    url, headers = f"/v1/requests/{received.request_id}/events", {"last-event-id": received.last_id}
    async with http.stream("GET", url, headers=headers) as answer:
        await read(answer, received, lambda _: None)


async def test_eight_clients_with_one_key_make_one_generation(
    gateways: list[httpx.AsyncClient], engine: FakeEngine
) -> None:
    answers = await asyncio.gather(
        *(
            gateways[number % 2].post("/v1/completions", json={**LONG, "n": 2}, headers=KEY)
            for number in range(8)
        )
    )

    assert [answer.status_code for answer in answers] == [200] * 8
    assert len({answer.content for answer in answers}) == 1


async def test_several_prompts_are_one_request(
    gateways: list[httpx.AsyncClient], engine: FakeEngine
) -> None:
    fields = {"prompt": [[1], [2], [3]], "max_tokens": 60}
    received = await break_stream_after(gateways[0], RESUMABLE, 10, **fields)

    whole = await read_rest(gateways[1], received)

    for choice in range(3):
        assert len(tokens_of(whole, choice)) == 60 and is_one_history(0, tokens_of(whole, choice))


async def test_background_is_answered_at_once_and_read_later(
    gateways: list[httpx.AsyncClient], engine: FakeEngine
) -> None:
    queued = await gateways[0].post("/v1/completions", json={**LONG, "background": True})

    assert queued.status_code == 202
    assert queued.json()["status"] in ("queued", "in_progress")
    url = queued.headers["location"]

    async def completed() -> bool:
        return bool((await gateways[1].get(url)).json()["status"] == "completed")

    await eventually(completed)
    body = (await gateways[1].get(url)).json()
    assert len(body["result"]["choices"][0]["token_ids"]) == 100
    assert body["expires_at"] > body["created_at"] + 86_400
    streamed = await gateways[1].get(f"{url}/events")
    assert sum(len(e["choices"][0]["token_ids"]) for e in events(streamed.text)) == 100


@pytest.mark.parametrize("window", [0.05])
async def test_a_request_whose_client_does_not_return_is_cancelled(
    gateways: list[httpx.AsyncClient], group: GatewayGroup, engine: FakeEngine
) -> None:
    engine.token_delay = 0.02
    received = await break_stream_after(gateways[0], KEY, 2, max_tokens=400)

    await eventually(group.is_idle)

    engine.token_delay = 0.001
    body = (await gateways[1].get(f"/v1/requests/{received.request_id}")).json()
    assert (body["status"], body["error"]["code"]) == ("cancelled", "cancelled")
    again = await gateways[1].post(
        "/v1/completions", json={**LONG, "stream": True, "max_tokens": 400}, headers=KEY
    )
    assert len(tokens_of(await parse_stream(again))) == 400


async def parse_stream(answer: httpx.Response) -> ReceivedStream:
    received = ReceivedStream()
    for block in answer.text.split("\n\n"):
        received.take(block)
    return received


@pytest.mark.parametrize("window", [2.0])
async def test_a_client_at_another_gateway_keeps_a_request_running(
    gateways: list[httpx.AsyncClient], engine: FakeEngine
) -> None:
    """The first gateway has no client for more than two windows. The windows are long enough for
    the client to come back on a busy machine."""
    engine.token_delay = 0.035
    received = await break_stream_after(gateways[0], RESUMABLE, 2, max_tokens=150)

    whole = await read_rest(gateways[1], received)

    assert whole.done and len(tokens_of(whole)) == 150


async def test_delete_cancels_at_any_gateway(
    gateways: list[httpx.AsyncClient], group: GatewayGroup, engine: FakeEngine
) -> None:
    engine.token_delay = 0.02
    received = await break_stream_after(gateways[0], RESUMABLE, 2, max_tokens=4000)

    deleted = await gateways[1].delete(f"/v1/requests/{received.request_id}")

    assert (deleted.status_code, deleted.json()["status"]) == (200, "cancelled")
    await eventually(group.is_idle)
    again = await gateways[0].delete(f"/v1/requests/{received.request_id}")
    assert again.json()["status"] == "cancelled"


@in_memory
async def test_a_plain_request_has_no_ids_and_cannot_be_found(
    gateways: list[httpx.AsyncClient], engine: FakeEngine
) -> None:
    answer = await gateways[0].post("/v1/completions", json={**LONG, "stream": True})

    assert "id: " not in answer.text and "content-location" not in answer.headers
    rid = next(events(answer.text))["id"].removeprefix("cmpl-")
    assert (await gateways[0].get(f"/v1/requests/{rid}")).status_code == 404


@in_memory
@pytest.mark.parametrize("rest", ["", "/events"])
async def test_an_unknown_id_says_what_to_do(gateways: list[httpx.AsyncClient], rest: str) -> None:
    answer = await gateways[0].get(f"/v1/requests/{'0' * 32}{rest}")

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "request_not_found"
    assert "Send the request again" in answer.json()["error"]["message"]


@in_memory
async def test_another_body_under_a_used_key_is_refused(
    gateways: list[httpx.AsyncClient], engine: FakeEngine
) -> None:
    await gateways[0].post("/v1/completions", json=LONG, headers=KEY)

    for path, body in (
        ("/v1/completions", {**LONG, "max_tokens": 7}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        refused = await gateways[1].post(path, json=body, headers=KEY)
        assert (refused.status_code, refused.headers["x-should-retry"]) == (422, "false")
        assert refused.json()["error"]["code"] == "idempotency_key_reused"
    same = {"user": None, **dict(reversed([*LONG.items()]))}
    assert (await gateways[1].post("/v1/completions", json=same, headers=KEY)).status_code == 200


@in_memory
@pytest.mark.parametrize(
    ("headers", "stream", "param"),
    [
        ({"idempotency-key": ""}, True, "Idempotency-Key"),
        ({"idempotency-key": "x" * 256}, True, "Idempotency-Key"),
        ({"x-resumable": "perhaps"}, True, "x-resumable"),
        ({"last-event-id": "1"}, True, "Last-Event-ID"),
        ({**KEY, "last-event-id": "1"}, True, "Last-Event-ID"),
        ({**KEY, "last-event-id": f"{'0' * 32}:1-00000000"}, True, "Last-Event-ID"),
        ({**KEY, "last-event-id": "1"}, False, "Last-Event-ID"),
    ],
)
async def test_invalid_headers_are_refused(
    gateways: list[httpx.AsyncClient], headers: dict[str, str], stream: bool, param: str
) -> None:
    body = {**LONG, "stream": stream}
    refused = await gateways[0].post("/v1/completions", json=body, headers=headers)

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


async def test_a_refused_request_leaves_its_key_free(backend: Backend, served: Models) -> None:
    group = GatewayGroup(backend, served, 60.0)
    group.limits = QueueLimits(max_requests=0)
    async with group.gateway("g1") as full:
        refused = await full.post("/v1/completions", json=LONG, headers=KEY)
    group.limits = QueueLimits()
    async with group.gateway("g2") as free:
        taken = await free.post("/v1/completions", json={**LONG, "max_tokens": 3}, headers=KEY)

    assert refused.json()["error"]["code"] == "queue_full"
    assert taken.status_code == 200


async def test_a_key_whose_request_never_reached_the_queue_can_be_used_again(
    gateways: list[httpx.AsyncClient], backend: Backend
) -> None:
    """The gateway died after storing and before queueing the request; its deadline has passed."""
    stored = await gateways[0].post("/v1/completions", json=LONG, headers=KEY)
    store = backend.request_store()
    kept = await store.get(stored.headers["content-location"].rpartition("/")[2])
    assert kept is not None
    await backend.wipe()
    late = tuple(replace(request, deadline_ms=1) for request in kept.requests)
    await store.put(replace(kept, requests=late))

    again = await gateways[1].post("/v1/completions", json=LONG, headers=KEY)

    assert again.status_code == 200


async def test_a_request_that_its_engine_lost_is_one_generation(
    gateways: list[httpx.AsyncClient], engine: FakeEngine, group: GatewayGroup
) -> None:
    engine.token_delay = 0.01
    received = await break_stream_after(gateways[0], KEY, 20)
    engine.lose()

    view = (await gateways[1].get(f"/v1/requests/{received.request_id}")).json()
    again, body = ReceivedStream(), {**LONG, "stream": True}
    async with gateways[1].stream("POST", "/v1/completions", json=body, headers=KEY) as answer:
        await read(answer, again, lambda _: None)
    whole = await read_rest(gateways[0], received)

    # The request is queued again at once, so an engine may not have taken it yet.
    assert view["status"] in ("queued", "in_progress") and view["error"] is None
    assert tokens_of(whole) == tokens_of(again)
    assert len(tokens_of(whole)) == 100 and is_one_history(0, tokens_of(whole))
    assert await group.is_idle()


@in_memory
@pytest.mark.parametrize("looked_at", [False, True])
async def test_an_answer_that_a_client_has_read_is_final(
    gateways: list[httpx.AsyncClient], backend: Backend, group: GatewayGroup, looked_at: bool
) -> None:
    """Its gateway can dispute an answer only until a client has read it."""
    answer = await gateways[0].post("/v1/completions", json=LONG, headers=KEY)
    url = answer.headers["content-location"]
    if looked_at:
        assert (await gateways[1].get(url)).json()["status"] == "completed"
    kept = await backend.request_store().get(url.rpartition("/")[2])
    assert kept is not None

    disputed = await backend.gateway("g1").admit(
        kept.requests[0], group.limits, seen=1, disputed=True
    )

    assert disputed.state is (AdmitState.ENDED if looked_at else AdmitState.ADMITTED)


async def test_a_request_that_redis_lost_is_not_restarted(
    gateways: list[httpx.AsyncClient], backend: Backend, group: GatewayGroup, engine: FakeEngine
) -> None:
    stored = await gateways[0].post("/v1/completions", json=LONG, headers=KEY)
    url = stored.headers["content-location"]
    kept = await backend.request_store().get(url.rpartition("/")[2])
    assert kept is not None
    await backend.wipe()
    await backend.request_store().put(replace(kept, created=kept.created - 120))

    answer = await gateways[1].get(f"{url}/events")
    status = (await gateways[1].get(url)).json()["status"]
    await backend.request_store().set_presence(
        kept.request_id, 60
    )  # as if a gateway that will restore it had it
    early = await gateways[1].get(f"{url}/events")

    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "state_lost")
    assert status == "failed"
    assert (early.status_code, early.json()["error"]["code"]) == (503, "state_lost")
    assert early.headers["retry-after"]
    assert (await gateways[1].get(url)).json()["status"] == "in_progress"
    assert await group.is_idle()


@in_memory
async def test_the_sdk_reads_a_resumable_stream_with_pauses(
    gateways: list[httpx.AsyncClient], group: GatewayGroup, engine: FakeEngine
) -> None:
    """Comments between events with ids must not become events of their own."""
    engine.token_delay = 0.03
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{group.ports['g1']}/v1", api_key="none"
    ) as sdk:
        stream = await sdk.completions.create(
            model=MODEL, prompt=[1, 2], max_tokens=10, stream=True, extra_headers=RESUMABLE
        )
        chunks = [chunk async for chunk in stream]

    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.asyncio(loop_scope="session")
async def test_background_requests_need_a_store(gateway: Gateway) -> None:
    answer = await gateway.complete(background=True)

    assert answer.status_code == 400
