"""Embeddings of models of late interaction (ColQwen2, ColPali): a vector for each token of a query
or of an image, as numbers or as base64, stored or not. What is too large is refused."""

import base64
import json
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from tokenizers import AddedToken

from headrace_common.protocol.store import StoredRequest
from headrace_common.text.checkpoint import CheckpointFiles
from headrace_common.text.errors import TokenizerError
from headrace_common.text.late_interaction import read_late_interaction, token_vector_size
from headrace_common.wire.messages import GenerateRequest
from headrace_gateway.generation.embedding_pipeline import MAX_ANSWER_NUMBERS
from headrace_gateway.generation.embeddings import of_tokens, stored_content
from headrace_gateway.queue_client.client import Delta
from headrace_gateway.resumable.stored_embeddings import bytes_of
from headrace_testing.backends import make_request
from headrace_testing.gateway import MODEL, Gateway, prompt_of, serve
from headrace_testing.images import IMAGE_TOKEN, PROCESSOR, image_part, picture
from headrace_testing.tokenizers import byte_level_tokenizer, write_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="session")

SIZE = 2
IMAGE_PROMPT = f"<|im_start|>{IMAGE_TOKEN}Describe.<|im_end|>"


def vectors(request: GenerateRequest) -> Sequence[Delta]:
    """A vector for each token: its number in the prompt, and a half."""
    rows = [(float(at), 0.5) for at in range(len(request.prompt_token_ids))]
    packed = b"".join(struct.pack("<2f", *row) for row in rows)
    return [Delta(choice=0, token_ids=(), finish_reason="stop", embedding=packed)]


def rows(count: int) -> list[list[float]]:
    return [[float(at), 0.5] for at in range(count)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder, backend = tmp_path_factory.mktemp("colqwen2"), byte_level_tokenizer()
    backend.add_special_tokens([AddedToken(IMAGE_TOKEN, special=True, normalized=False)])
    config = {
        "model_type": "colqwen2",
        "embedding_dim": SIZE,
        "vlm_config": {
            "image_token_id": backend.token_to_id(IMAGE_TOKEN),
            "text_config": {"max_position_embeddings": 4096, "hidden_size": 64},
        },
    }
    write_checkpoint(folder, backend, chat_template=None, config=config, pad_token="<|endoftext|>")
    processor = {
        "image_processor": dict(PROCESSOR),
        "query_prefix": "Ask: ",
        "visual_prompt_prefix": IMAGE_PROMPT,
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))
    async with serve(folder) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def colqwen(serving: Gateway) -> Gateway:
    serving.engine.reset()
    serving.engine.script = vectors
    return serving


async def ask(gateway: Gateway, **fields: Any) -> httpx.Response:
    return await gateway.http.post("/v1/embeddings", json={"model": MODEL, **fields})


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "Where is it?"},
        {"input": ["Where is it?"]},
        {"messages": user({"type": "text", "text": "Where is it?"})},
    ],
)
async def test_a_text_is_a_query(colqwen: Gateway, fields: dict[str, Any]) -> None:
    answer = await ask(colqwen, **fields)

    (request,) = colqwen.engine.submitted
    count = len(request.prompt_token_ids)
    assert answer.status_code == 200, answer.text
    assert prompt_of(colqwen) == "Ask: Where is it?" + "<|endoftext|>" * 10 + "\n"
    assert [item["embedding"] for item in answer.json()["data"]] == [rows(count)]
    assert answer.json()["usage"]["prompt_tokens"] == count


async def test_token_ids_are_embedded_as_they_are(colqwen: Gateway) -> None:
    answer = await ask(colqwen, input=[[5, 6, 7], [8]])

    assert [each.prompt_token_ids for each in colqwen.engine.submitted] == [(5, 6, 7), (8,)]
    assert [item["embedding"] for item in answer.json()["data"]] == [rows(3), rows(1)]


async def test_an_image_has_the_prompt_of_the_checkpoint(colqwen: Gateway) -> None:
    answer = await ask(colqwen, messages=user(image_part(picture(112, 56))))

    assert answer.status_code == 200, answer.text
    (request,) = colqwen.engine.submitted
    assert prompt_of(colqwen) == IMAGE_PROMPT.replace(IMAGE_TOKEN, IMAGE_TOKEN * 8)
    assert [(each.start, each.length) for each in request.images] == [(1, 8)]
    assert len(answer.json()["data"][0]["embedding"]) == len(request.prompt_token_ids)


async def test_an_image_and_a_text_are_not_one_input(colqwen: Gateway) -> None:
    parts = (image_part(picture()), {"type": "text", "text": "What?"})

    answer = await ask(colqwen, messages=user(*parts))

    assert answer.status_code == 400 and not colqwen.engine.submitted
    assert "embeds one image or one text" in answer.json()["error"]["message"]


async def test_base64_has_the_vectors_one_after_the_other(colqwen: Gateway) -> None:
    answer = await ask(colqwen, input=[5, 6, 7], encoding_format="base64")

    packed = base64.b64decode(answer.json()["data"][0]["embedding"])
    assert packed == struct.pack("<6f", *(number for row in rows(3) for number in row))
    async with AsyncOpenAI(base_url=f"{colqwen.url}/v1", api_key="none") as client:
        given = await client.embeddings.create(model=MODEL, input=[5, 6, 7])
    assert given.data[0].embedding == [0.0, 0.5, 1.0, 0.5, 2.0, 0.5]


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_a_stored_answer_is_that_of_a_new_one(colqwen: Gateway, encoding: Any) -> None:
    new = await ask(colqwen, input=[[5, 6], [7]], encoding_format=encoding)
    requests = tuple(colqwen.engine.submitted)
    stored = StoredRequest(
        request_id="r",
        operation="embeddings",
        fingerprint=b"",
        created=0,
        expires_ms=0,
        requests=tuple(replace(each, model=MODEL) for each in requests),
        form=of_tokens(encoding),
    )
    packed = [bytes(vectors(each)[0].embedding or b"") for each in requests]

    assert await stored_content(stored, packed) == new.content


async def test_vectors_of_all_tokens_are_counted_in_the_store() -> None:
    request = make_request()
    tokens = len(request.prompt_token_ids)

    assert bytes_of([request], 4096, SIZE) - bytes_of([request], 4096, 1) == 4 * tokens
    assert bytes_of([request], None, SIZE) < bytes_of([request], None)


async def test_too_many_vectors_are_refused(
    colqwen: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "headrace_gateway.generation.embedding_pipeline.MAX_ANSWER_NUMBERS", 3 * SIZE
    )

    allowed, refused = [await ask(colqwen, input=[[1, 2], [3] * more]) for more in (1, 2)]

    assert allowed.status_code == 200
    assert refused.status_code == 400 and MAX_ANSWER_NUMBERS > 3 * SIZE
    assert "4 vectors, which is over the limit of 3" in refused.json()["error"]["message"]


async def test_scores_are_refused(colqwen: Gateway) -> None:
    body = {"model": MODEL, "query": "a", "documents": ["b"]}

    answer = await colqwen.http.post("/v1/rerank", json=body)

    assert answer.status_code == 400 and "a vector for each token" in answer.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", {"model_type": "colqwen2", "embedding_dim": 0}, "embedding_dim must be"),
        ("processor_config.json", {"query_prefix": 3}, "query_prefix must be a text"),
        ("tokenizer_config.json", {}, "a pad_token is missing"),
    ],
)
async def test_a_fault_in_a_file_is_named(name: str, content: object, message: str) -> None:
    files: dict[str, object] = {
        "config.json": {"model_type": "colqwen2"},
        "tokenizer_config.json": {"pad_token": {"content": "<pad>"}},
    }
    packed = {each: json.dumps(value).encode() for each, value in (files | {name: content}).items()}

    with pytest.raises(TokenizerError, match=message):
        read_late_interaction(CheckpointFiles("model", packed))


@pytest.mark.parametrize(
    ("kind", "query", "image"),
    [
        (
            "colqwen2",
            "Query: a",
            "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image."
            "<|im_end|><|endoftext|>",
        ),
        ("colpali", "<bos>Question: a", "<image><bos>Describe the image.\n"),
    ],
)
async def test_transformers_defaults_are_used(kind: str, query: str, image: str) -> None:
    tokens = {"pad_token": {"content": "<pad>"}, "bos_token": "<bos>"}
    files = {"config.json": {"model_type": kind}, "tokenizer_config.json": tokens}
    packed = {name: json.dumps(content).encode() for name, content in files.items()}

    found = read_late_interaction(CheckpointFiles("model", packed))

    assert found is not None and found.size == 128
    assert found.query("a") == query + "<pad>" * 10 + "\n"
    assert found.image_prompt == image
    assert token_vector_size({"model_type": "qwen2_vl"}) is None
