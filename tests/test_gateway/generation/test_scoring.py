"""/v1/score and /v1/rerank over real sockets, with an engine that makes vectors from a script."""

import json
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
import pytest_asyncio

from headrace_common.errors import FailureCode, RequestFailed
from headrace_common.wire.messages import GenerateRequest
from headrace_gateway.queue_client.client import Delta
from headrace_testing.gateway import MODEL, Gateway, serve
from headrace_testing.tokenizers import byte_level_tokenizer, write_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATHS = ["/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"]


def answering(*numbers: float) -> Sequence[Delta]:
    packed = struct.pack(f"<{len(numbers)}f", *numbers)
    return [Delta(choice=0, token_ids=(), finish_reason="stop", embedding=packed)]


def embed_script(request: GenerateRequest) -> Sequence[Delta]:
    """A vector at an angle that grows with the prompt's length."""
    return answering(3.0, float(len(request.prompt_token_ids) - 1))


def cross_script(request: GenerateRequest) -> Sequence[Delta]:
    return answering(len(request.prompt_token_ids) / 64)


@pytest.fixture
def embedder(gateway: Gateway) -> Gateway:
    gateway.engine.script = embed_script
    return gateway


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    config = {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "vocab_size": 512,
        "max_position_embeddings": 64,
    }
    folder = write_checkpoint(
        tmp_path_factory.mktemp("cross"), byte_level_tokenizer(), config=config
    )
    async with serve(folder) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def cross(serving: Gateway) -> Gateway:
    serving.engine.reset()
    serving.engine.script = cross_script
    return serving


async def ask(gateway: Gateway, path: str, **fields: Any) -> httpx.Response:
    return await gateway.http.post(path, json={"model": MODEL, **fields})


async def test_vectors_are_compared_by_their_angle(embedder: Gateway) -> None:
    answer = await ask(embedder, "/v1/score", text_1="a", text_2=["b", "cdefg"])
    body = answer.json()

    assert answer.status_code == 200, answer.text
    assert body["object"] == "list" and body["model"] == MODEL and body["id"]
    lengths = [len(each.prompt_token_ids) for each in embedder.engine.submitted]
    (query, *others) = [(3.0, length - 1.0) for length in lengths]
    expected = [
        (query[0] * x + query[1] * y) / (3 * 3 + query[1] ** 2) ** 0.5 / (x * x + y * y) ** 0.5
        for x, y in others
    ]
    assert [each["score"] for each in body["data"]] == pytest.approx(expected)
    assert [(each["index"], each["object"]) for each in body["data"]] == [
        (0, "score"),
        (1, "score"),
    ]
    assert body["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}


async def test_lists_are_compared_in_pairs(cross: Gateway) -> None:
    answer = await ask(cross, "/v1/score", text_1=["a", "bb"], text_2=["ccc", "d"])

    tokenizer = cross.engine.tokenizer
    prompts = [each.prompt_token_ids for each in cross.engine.submitted]
    assert prompts == [
        tuple(tokenizer.encode_pair("a", "ccc")),
        tuple(tokenizer.encode_pair("bb", "d")),
    ]
    scores = [each["score"] for each in answer.json()["data"]]
    assert scores == [len(prompt) / 64 for prompt in prompts]


@pytest.mark.parametrize("path", PATHS[2:])
async def test_the_best_documents_come_first(cross: Gateway, path: str) -> None:
    documents = ["xy", {"text": "a long one"}, "some"]
    body = (await ask(cross, path, query="q", documents=documents, top_n=2)).json()
    bare = (
        await ask(cross, path, query="q", documents=documents, return_documents=False, top_n=0)
    ).json()

    assert [each["index"] for each in body["results"]] == [1, 2]
    assert [each["document"] for each in body["results"]] == [
        {"text": "a long one"},
        {"text": "some"},
    ]
    scores = [each["relevance_score"] for each in body["results"]]
    assert scores == sorted(scores, reverse=True) and body["usage"]["total_tokens"] > 0
    assert [sorted(each) for each in bare["results"]] == [["index", "relevance_score"]] * 3


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": [], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b" * 65_536]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b c " * 200]}, "documents"),
        ("/v1/rerank", {"query": "a" * 5000, "documents": ["b"] * 500}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents[0].text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": []}, "rank_fields"),
    ],
)
async def test_inputs_that_cannot_be_scored_are_refused_by_field(
    cross: Gateway, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = await ask(cross, path, **fields)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param.split("[")[0])
    assert not cross.engine.submitted


async def test_a_cross_encoder_makes_no_vectors_and_scores_are_not_stored(cross: Gateway) -> None:
    vectors = await ask(cross, "/v1/embeddings", input="a")
    stored = await cross.http.post(
        "/v1/rerank",
        json={"model": MODEL, "query": "a", "documents": ["b"]},
        headers={"Idempotency-Key": "k"},
    )

    assert vectors.status_code == 400 and "/v1/rerank" in vectors.json()["error"]["message"]
    assert stored.status_code == 400 and stored.json()["error"]["param"] == "idempotency-key"


async def test_a_document_that_fails_fails_the_request(cross: Gateway) -> None:
    def script(request: GenerateRequest) -> Sequence[Delta]:
        if len(cross.engine.submitted) > 1:
            raise RequestFailed(FailureCode.INTERNAL, "It broke.")
        return cross_script(request)

    cross.engine.script = script
    answer = await ask(cross, "/v1/rerank", query="a", documents=["b", "c"])

    assert answer.status_code >= 400 and json.loads(answer.content)["error"]["message"]
