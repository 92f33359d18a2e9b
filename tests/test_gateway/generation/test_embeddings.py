"""/v1/embeddings over real sockets, with an engine that makes vectors from a script."""

import asyncio
import base64
import struct
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from starlette.requests import Request

from headrace_common.errors import FailureCode, QueueFull, RequestFailed
from headrace_common.wire.messages import GenerateRequest
from headrace_gateway.generation.admission import BODY_ARRIVED, TOKENIZING_S, tokenizing_limit
from headrace_gateway.queue_client.client import Delta
from headrace_gateway.resumable.embedding_batch import IN_FLIGHT
from headrace_testing.gateway import MODEL, Gateway
from headrace_testing.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


def vector_of(request: GenerateRequest) -> list[float]:
    """A vector of the requested size; its first number is the prompt's length."""
    assert request.pooling is not None
    return [len(request.prompt_token_ids) + 0.1] + [0.25] * ((request.pooling.dimensions or 4) - 1)


def embed_script(request: GenerateRequest) -> Sequence[Delta]:
    vector = vector_of(request)
    packed = struct.pack(f"<{len(vector)}f", *vector)
    return [Delta(choice=0, token_ids=(), finish_reason="stop", embedding=packed)]


@pytest.fixture
def embedder(gateway: Gateway) -> Gateway:
    gateway.engine.script = embed_script
    return gateway


async def ask(gateway: Gateway, **fields: Any) -> httpx.Response:
    return await gateway.http.post("/v1/embeddings", json={"model": MODEL, **fields})


async def test_each_input_gets_its_vector_in_order(embedder: Gateway) -> None:
    answer = await ask(embedder, input=[[1, 2, 3], [4], [5, 6]])

    body = answer.json()
    assert answer.status_code == 200
    assert body["object"] == "list" and body["model"] == MODEL
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    assert [round(item["embedding"][0]) for item in body["data"]] == [3, 1, 2]
    assert body["usage"] == {"prompt_tokens": 6, "total_tokens": 6}


@pytest.mark.parametrize("form", ["Hello", ["Hello"], [1, 2], [[1, 2]]])
async def test_all_forms_of_input_are_taken(embedder: Gateway, form: object) -> None:
    answer = await ask(embedder, input=form)

    assert len(answer.json()["data"]) == 1


async def test_numbers_are_exactly_those_of_the_engine(embedder: Gateway) -> None:
    numbers = (await ask(embedder, input=[7])).json()["data"][0]["embedding"]
    text = (await ask(embedder, input=[7], encoding_format="base64")).json()["data"][0]["embedding"]

    packed = base64.b64decode(text)
    assert packed == struct.pack("<4f", 1.1, 0.25, 0.25, 0.25)
    assert struct.pack(f"<{len(numbers)}f", *numbers) == packed


async def test_texts_are_tokenised_in_bounded_time(
    embedder: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_gateway.generation.admission.TOKENIZING_S", 0.0)
    monkeypatch.setattr("headrace_gateway.limits.work.INLINE_SIZE", 0)

    answer = await ask(embedder, input=["Hello", "world"])

    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_texts_have_less_time_if_their_body_has_waited() -> None:
    arrived = asyncio.get_running_loop().time() - TOKENIZING_S
    request = Request({"type": "http", "state": {BODY_ARRIVED: arrived}})

    with pytest.raises(RequestFailed, match="send less at once"):
        async with tokenizing_limit(request):
            await asyncio.Event().wait()


async def test_a_large_answer_is_whole(embedder: Gateway) -> None:
    answer = await ask(embedder, input=[[1]] * 20, dimensions=1024)

    assert [len(item["embedding"]) for item in answer.json()["data"]] == [1024] * 20


async def test_the_openai_sdk_reads_it(embedder: Gateway) -> None:
    client = openai.AsyncOpenAI(base_url=f"{embedder.url}/v1", api_key="x", max_retries=0)

    answer = await client.embeddings.create(model=MODEL, input=["a", "bcd"], dimensions=3)

    assert [len(item.embedding) for item in answer.data] == [3, 3]
    assert answer.usage.prompt_tokens > 0
    await client.close()


async def test_only_some_inputs_are_in_the_queue_at_a_time(embedder: Gateway) -> None:
    embedder.engine.gate.clear()
    asking = asyncio.create_task(ask(embedder, input=[[1]] * (IN_FLIGHT + 10)))

    async def filled() -> bool:
        return len(embedder.engine.submitted) >= IN_FLIGHT

    await eventually(filled)
    assert len(embedder.engine.submitted) == IN_FLIGHT

    embedder.engine.gate.set()
    assert len((await asking).json()["data"]) == IN_FLIGHT + 10


async def test_a_client_that_leaves_ends_all_its_inputs(embedder: Gateway) -> None:
    embedder.engine.gate.clear()
    asking = asyncio.create_task(ask(embedder, input=[[1], [2], [3]]))

    async def queued() -> bool:
        return len(embedder.engine.submitted) == 3

    async def cancelled() -> bool:
        return len(embedder.engine.cancellations) == 3

    await eventually(queued)
    asking.cancel()
    await eventually(cancelled)


async def test_a_queue_that_is_full_refuses_the_request(embedder: Gateway) -> None:
    embedder.engine.refusal = QueueFull("the queue is full", retry_after=3.0)

    answer = await ask(embedder, input="x")

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "3"


async def test_a_queue_that_fills_up_later_is_waited_for(embedder: Gateway) -> None:
    engine = embedder.engine
    engine.gate.clear()
    asking = asyncio.create_task(ask(embedder, input=[[1]] * (IN_FLIGHT + 1)))

    async def filled() -> bool:
        return len(engine.submitted) == IN_FLIGHT

    await eventually(filled)
    engine.refusal = QueueFull("the queue is full", retry_after=0.01)
    engine.gate.set()

    async def only_one_left() -> bool:
        return len(engine.submitted) == IN_FLIGHT and not engine.cancellations

    await eventually(only_one_left)
    engine.refusal = None
    assert (await asking).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "input", None),
        ({"input": None}, "input", None),
        ({"input": ""}, "input", None),
        ({"input": []}, "input", None),
        ({"input": [[]]}, "input[0]", None),
        ({"input": {"text": "x"}}, "input", None),
        ({"input": ["a", [1]]}, "input[1]", None),
        ({"input": [10**9]}, "input", None),
        ({"input": "x", "dimensions": 0}, "dimensions", None),
        ({"input": "x", "dimensions": 2**20}, "dimensions", None),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", None),
        ({"input": "x", "stream": True}, "stream", "unknown_parameter"),
        ({"input": [[5]] * 2049}, "input", None),
        ({"input": [7] * 513}, "input", "context_length_exceeded"),
        ({"input": "x", "model": "other"}, "model", "model_not_found"),
    ],
)
async def test_fields_that_no_engine_supports_are_refused_by_name(
    embedder: Gateway, fields: dict[str, Any], param: str, code: str | None
) -> None:
    answer = await ask(embedder, **fields)

    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert (error["param"], error["code"]) == (param, code)
    assert not embedder.engine.submitted


async def test_an_input_may_fill_the_whole_context(embedder: Gateway) -> None:
    assert (await ask(embedder, input=[7] * 512)).status_code == 200


async def test_a_refusal_by_the_engine_is_a_client_error(embedder: Gateway) -> None:
    embedder.engine.script = lambda request: []
    embedder.engine.failure = RequestFailed(FailureCode.INVALID, "this model makes text")

    answer = await ask(embedder, input="x")

    assert answer.status_code == 400
    assert "makes text" in answer.json()["error"]["message"]


async def test_an_engine_without_embeddings_is_detected(embedder: Gateway) -> None:
    embedder.engine.script = embedder.engine.say("x")

    answer = await ask(embedder, input="x")

    assert answer.status_code == 500
    assert "makes no embeddings" in answer.json()["error"]["message"]
