"""Images that are uploaded once to /v1/files and named by requests, with the official SDKs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic, NotFoundError
from openai import AsyncOpenAI

from headrace_common.protocol.batches import StoredFile
from headrace_common.protocol.redis.files import RedisFiles
from headrace_gateway.limits.api_keys import KeyFile
from headrace_gateway.models.loading import load_static
from headrace_gateway.models.models import Models
from headrace_gateway.settings import GatewaySettings
from headrace_testing.api_keys import KeyBook
from headrace_testing.backends import MODEL, OverRedis
from headrace_testing.batches import batch_gateway, jsonl, line
from headrace_testing.fake_engine import FakeEngine
from headrace_testing.images import bomb, picture, write_vision_checkpoint

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
# The name of the field with the file's id.
FIELDS = {
    CHAT: "messages[0].content[0].file.file_id",
    RESPONSES: "input[0].content[0].file_id",
    MESSAGES: "messages[0].content[0].source.file_id",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = write_vision_checkpoint(tmp_path_factory.mktemp("vision"))
    return Models(load_static(GatewaySettings(model=str(folder), served_model_name=MODEL)))


@pytest.fixture
def backend(over_redis: OverRedis) -> OverRedis:
    return over_redis


@pytest.fixture
async def engine(backend: OverRedis) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(
        backend.engine(), MODEL, token_delay=0.001, beat_interval=0.2
    ).running() as engine:
        yield engine


@pytest.fixture
async def http(backend: OverRedis, served: Models) -> AsyncIterator[httpx.AsyncClient]:
    async with batch_gateway(backend, served, "g1") as http:
        yield http


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of all files whose content a gateway has read from Redis."""
    ids: list[str] = []
    content = RedisFiles.content

    async def counted(files: RedisFiles, file: StoredFile) -> bytes:
        ids.append(file.id)
        return await content(files, file)

    monkeypatch.setattr(RedisFiles, "content", counted)
    return ids


async def upload(
    http: httpx.AsyncClient, content: bytes, purpose: str = "vision", **headers: str
) -> httpx.Response:
    return await http.post(
        "/v1/files",
        files={"file": ("cat.png", content)},
        data={"purpose": purpose},
        headers=headers,
    )


async def uploaded(http: httpx.AsyncClient, content: bytes, **headers: str) -> str:
    answer = await upload(http, content, **headers)
    assert answer.status_code == 200, answer.text
    name: str = answer.json()["id"]
    return name


def body(path: str, file_id: str) -> dict[str, Any]:
    """A question about an uploaded image."""
    part: dict[str, Any]
    match path:
        case "/v1/responses":
            part = {"type": "input_image", "file_id": file_id}
            item = {"role": "user", "content": [part]}
            return {"model": MODEL, "input": [item], "max_output_tokens": 2, "store": False}
        case "/v1/messages":
            part = {"type": "image", "source": {"type": "file", "file_id": file_id}}
        case _:
            part = {"type": "file", "file": {"file_id": file_id}}
    message = {"role": "user", "content": [part]}
    return {"model": MODEL, "messages": [message], "max_tokens": 2}


async def ask(
    http: httpx.AsyncClient, file_id: str, path: str = CHAT, **headers: str
) -> httpx.Response:
    return await http.post(path, json=body(path, file_id), headers=headers)


async def test_openais_sdk_uploads_an_image_and_asks_about_it(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="x", max_retries=0) as client:
        file = await client.files.create(file=("cat.png", picture()), purpose="vision")
        image: Any = {"type": "input_image", "file_id": file.id, "detail": "auto"}
        await client.responses.create(
            model=MODEL, input=[{"role": "user", "content": [image]}], store=False
        )
        part: Any = {"type": "file", "file": {"file_id": file.id}}
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": [part]}], max_tokens=2
        )
        assert [one.id async for one in client.files.list(purpose="vision")] == [file.id]
        assert (await client.files.content(file.id)).content == picture()

    assert engine.images == [picture()] * 2


async def test_anthropics_sdk_uploads_an_image_and_asks_about_it(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    async with AsyncAnthropic(base_url=str(http.base_url), api_key="x", max_retries=0) as client:
        files = [
            await client.files.upload(
                file=("cat.png", picture(shade=shade)), expires_in_seconds=9999
            )
            for shade in (1, 2)
        ]
        image: Any = {"type": "image", "source": {"type": "file", "file_id": files[0].id}}
        call: Any = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
        result: Any = {"type": "tool_result", "tool_use_id": "c1", "content": [image]}
        messages: Any = [
            {"role": "user", "content": [image]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        await client.messages.create(model=MODEL, max_tokens=2, messages=messages)
        listed = [one.id async for one in client.files.list(limit=1)]  # in two pages
        assert sorted(listed) == sorted(file.id for file in files)
        known = await client.files.retrieve_metadata(files[0].id)
        assert known == files[0]
        assert (known.type, known.mime_type, known.filename) == ("file", "image/png", "cat.png")
        assert known.size_bytes == len(picture(shade=1))
        assert known.expires_at is not None
        assert (known.expires_at - known.created_at).total_seconds() == 9999
        assert await (await client.files.download(files[0].id)).read() == picture(shade=1)
        assert (await client.files.delete(files[0].id)).type == "file_deleted"
        with pytest.raises(NotFoundError):
            await client.files.retrieve_metadata(files[0].id)

    assert engine.images == [picture(shade=1)] * 2


@pytest.mark.parametrize("path", FIELDS)
async def test_a_deleted_image_is_refused_by_its_field(http: httpx.AsyncClient, path: str) -> None:
    file_id = await uploaded(http, picture())
    assert (await http.delete(f"/v1/files/{file_id}")).status_code == 200

    answer = await ask(http, file_id, path)

    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"].startswith(f"{FIELDS[path]}: there is no file '{file_id}'")
    if path != MESSAGES:
        assert (error["code"], error["param"]) == ("file_not_found", FIELDS[path])


async def test_an_uploaded_image_outlives_its_gateway(
    backend: OverRedis, served: Models, engine: FakeEngine
) -> None:
    large = picture(1200, 1200, "PNG") + b"\0" * (2**20 + 1)  # two pieces
    async with batch_gateway(backend, served, "g1") as http:
        file_id = await uploaded(http, large)
    async with batch_gateway(backend, served, "g2") as http:
        answer = await ask(http, file_id)

    assert answer.status_code == 200, answer.text
    assert engine.images == [large]


async def test_an_uploaded_image_belongs_to_its_tenant(
    backend: OverRedis, served: Models, engine: FakeEngine, tmp_path: Path
) -> None:
    book = KeyBook(tmp_path / "keys.yaml")
    owner, colleague = book.add("a", tenant="team-a"), book.add("b", tenant="team-a")
    stranger = book.add("c", tenant="team-b")
    key_file = KeyFile(book.path)
    key_file.start()
    try:
        async with batch_gateway(backend, served, "g1", keys=key_file) as http:
            file_id = await uploaded(http, picture(), authorization=f"Bearer {owner}")
            answers = [
                await ask(http, file_id, authorization=f"Bearer {key}")
                for key in (owner, colleague, stranger)
            ]
            unknown = await ask(http, "file-0", authorization=f"Bearer {stranger}")
    finally:
        await key_file.close()

    assert [answer.status_code for answer in answers] == [200, 200, 400]
    # the same answer as for a file that does not exist
    assert answers[2].text.replace(file_id, "file-0") == unknown.text


async def test_64_requests_about_an_uploaded_image_read_it_once(
    backend: OverRedis, served: Models, engine: FakeEngine, loaded: list[str]
) -> None:
    async with batch_gateway(backend, served, "g1") as http:
        file_id = await uploaded(http, picture())
    async with batch_gateway(backend, served, "g2") as http:
        answers = await asyncio.gather(*(ask(http, file_id) for _ in range(64)))

    assert {answer.status_code for answer in answers} == {200}
    assert loaded == [file_id]
    assert engine.images == [picture()] * 64


async def test_an_image_that_was_just_uploaded_is_in_memory(
    http: httpx.AsyncClient, engine: FakeEngine, loaded: list[str]
) -> None:
    assert (await ask(http, await uploaded(http, picture()))).status_code == 200
    assert loaded == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no image", "it is not a PNG, JPEG, WebP or GIF"),
        (picture(300, 300)[:-60], "it is damaged"),
        (bomb(5000), "pixels"),
        (b"\x89PNG" + b"x" * 4096, "at most 4096 bytes (max_image_bytes)"),
    ],
    ids=["text", "truncated", "bomb", "large"],
)
async def test_an_upload_that_is_no_image_is_refused(
    backend: OverRedis, served: Models, content: bytes, reason: str
) -> None:
    limit = 4096 if "max_image_bytes" in reason else 2**20
    async with batch_gateway(backend, served, "g1", max_image_bytes=limit) as http:
        answer = await upload(http, content)
        listed = (await http.get("/v1/files")).json()["data"]

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_image", "file")
    assert reason in error["message"]
    assert listed == []


async def test_a_file_of_a_batch_is_no_image(http: httpx.AsyncClient) -> None:
    file = (await upload(http, jsonl([line("a")]), "batch")).json()

    answer = await ask(http, file["id"])

    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith("upload the image with the purpose 'vision'.")


async def test_images_count_as_stored_files(backend: OverRedis, served: Models) -> None:
    async with batch_gateway(backend, served, "g1", max_stored_files=1) as http:
        await uploaded(http, picture())
        answer = await upload(http, picture(shade=7))

    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "file_storage_full"


async def test_a_stored_conversation_names_the_file(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    file_id = await uploaded(http, picture())
    first = await http.post(RESPONSES, json={**body(RESPONSES, file_id), "store": True})
    assert first.status_code == 200, first.text
    following = {"model": MODEL, "input": "Sure?", "previous_response_id": first.json()["id"]}
    second = await http.post(RESPONSES, json={**following, "max_output_tokens": 2})
    await http.delete(f"/v1/files/{file_id}")
    third = await http.post(RESPONSES, json=following)

    assert second.status_code == 200, second.text
    assert engine.images == [picture()] * 2
    assert third.status_code == 400
    assert third.json()["error"]["code"] == "file_not_found"


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "input_image"}, "give one of both"),
        ({"type": "input_image", "file_id": "a", "image_url": "data:,"}, "give one of both"),
    ],
)
async def test_an_image_is_at_one_place(
    http: httpx.AsyncClient, part: dict[str, str], reason: str
) -> None:
    item = {"role": "user", "content": [part]}
    answer = await http.post(RESPONSES, json={"model": MODEL, "input": [item]})

    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


async def test_file_data_is_refused_by_name(http: httpx.AsyncClient) -> None:
    part = {"type": "file", "file": {"file_data": "data:image/png;base64,QQ==", "filename": "a"}}
    answer = await http.post(
        CHAT, json={"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
    )

    assert answer.status_code == 400
    assert "image_url" in answer.json()["error"]["message"], answer.text
