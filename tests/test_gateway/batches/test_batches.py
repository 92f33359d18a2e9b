"""Files and batches over one Valkey: complete, interrupted, taken over, and separate for each
tenant."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headrace_common.config.api_keys import DEFAULT_TENANT
from headrace_common.protocol.accounts import ItemKind
from headrace_common.protocol.batches import encode_record
from headrace_common.protocol.redis.batches import RedisBatches
from headrace_common.wire import keys
from headrace_gateway.limits.api_keys import KeyFile
from headrace_gateway.limits.budget import Budget
from headrace_gateway.limits.tenant_stores import RECORD_BYTES
from headrace_gateway.models.models import Models
from headrace_testing.api_keys import KeyBook
from headrace_testing.backends import MODEL, OverRedis
from headrace_testing.batches import BatchClient, batch_gateway, jsonl, line
from headrace_testing.fake_engine import FakeEngine
from headrace_testing.waiting import eventually


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
async def client(backend: OverRedis, served: Models) -> AsyncIterator[BatchClient]:
    async with batch_gateway(backend, served, "g1") as http:
        yield BatchClient(http)


async def waiting(backend: OverRedis) -> int:
    return (await backend.gateway("observer").depth(MODEL)).waiting


async def test_every_line_of_a_batch_gets_its_result(
    client: BatchClient, engine: FakeEngine
) -> None:
    lines = [line(f"l{i}", max_tokens=1 + i % 5) for i in range(40)]
    lines[7]["body"]["max_tokens"] = -1

    batch = await client.ended(await client.begin(lines, metadata={"for": "a test"}))

    output = await client.content(batch["output_file_id"])
    assert batch["status"] == "completed" and batch["model"] == MODEL
    assert batch["request_counts"] == {"total": 40, "completed": 39, "failed": 1}
    assert batch["metadata"] == {"for": "a test"}
    used = sum(1 + i % 5 for i in range(40) if i != 7)
    assert batch["usage"]["input_tokens"] == 2 * 39
    assert (batch["usage"]["output_tokens"], batch["usage"]["total_tokens"]) == (used, used + 78)
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["completed_at"]
    assert set(output) == {f"l{i}" for i in range(40)} - {"l7"}
    for name, result in output.items():
        assert result["error"] is None
        assert result["response"]["status_code"] == 200 and result["response"]["request_id"]
        usage = result["response"]["body"]["usage"]
        assert usage["completion_tokens"] == 1 + int(name[1:]) % 5
    (failed,) = (await client.content(batch["error_file_id"])).values()
    assert failed["custom_id"] == "l7" and failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == "max_tokens"


async def test_the_openai_sdk_runs_a_batch(client: BatchClient, engine: FakeEngine) -> None:
    sdk = openai.AsyncOpenAI(base_url=f"{client.http.base_url}/v1", api_key="x", max_retries=0)
    content = jsonl([line("a"), line("b")])

    file = await sdk.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await sdk.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    ended = await client.ended(batch.id)
    output = await sdk.files.content(ended["output_file_id"])

    assert len(output.content.splitlines()) == 2
    assert [one.id async for one in sdk.batches.list(limit=1)] == [batch.id]
    assert {one.purpose async for one in sdk.files.list()} == {"batch", "batch_output"}
    assert (await sdk.files.content(file.id)).content == content
    assert (await sdk.files.delete(file.id)).deleted
    await sdk.close()


async def test_batches_wait_for_all_other_requests(client: BatchClient, backend: OverRedis) -> None:
    lines = [line("a"), line("b", priority=-5), line("c", priority=2000)]
    await client.begin(lines)

    async def queued() -> bool:
        return await waiting(backend) == 3

    await eventually(queued)
    leases = await backend.engine("probe").take(10)
    assert sorted(lease.request.priority for lease in leases) == [1000, 1000, 2000]


async def test_only_some_lines_are_in_the_queue_at_once(backend: OverRedis, served: Models) -> None:
    async with batch_gateway(backend, served, "g1", batch_concurrency=3) as http:
        client = BatchClient(http)
        batch_id = await client.begin([line(f"l{i}") for i in range(20)])

        async def queued() -> bool:
            return await waiting(backend) >= 3

        await eventually(queued)
        assert await waiting(backend) == 3
        engine = FakeEngine(backend.engine(), MODEL, token_delay=0.001)
        task = asyncio.create_task(engine.run())
        batch = await client.ended(batch_id)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert batch["request_counts"]["completed"] == 20


async def test_a_cancelled_batch_leaves_nothing_in_the_queue(
    client: BatchClient, backend: OverRedis
) -> None:
    batch_id = await client.begin([line("a"), line("b")])

    async def queued() -> bool:
        return await waiting(backend) == 2

    await eventually(queued)
    answer = await client.post(f"/v1/batches/{batch_id}/cancel")
    batch = await client.ended(batch_id)

    assert answer.json()["status"] == "cancelling"
    assert batch["status"] == "cancelled" and batch["cancelled_at"] and batch["cancelling_at"]
    assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    errors = await client.content(batch["error_file_id"])
    assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"}
    assert await waiting(backend) == 0
    again = await client.post(f"/v1/batches/{batch_id}/cancel")
    assert again.json()["status"] == "cancelled"


async def test_a_batch_past_its_window_ends_with_what_it_has(
    backend: OverRedis, served: Models
) -> None:
    async with batch_gateway(backend, served, "g1") as http:
        batch_id = await BatchClient(http).begin([line("a"), line("b")])
    store = RedisBatches(backend.connect())
    batch = await store.get(batch_id)
    late = replace(batch.request, expires_at=batch.request.created_at - 1)
    await backend.client.command("HSET", keys.batch(batch_id), "m", encode_record(late))

    async with batch_gateway(backend, served, "g2") as http:
        client = BatchClient(http)
        ended = await client.ended(batch_id)
        errors = await client.content(ended["error_file_id"])

    assert ended["status"] == "expired" and ended["expired_at"]
    assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"}


async def test_another_gateway_continues_a_stopped_gateways_batch(
    backend: OverRedis, served: Models
) -> None:
    engine = FakeEngine(backend.engine(), MODEL, token_delay=0.02, slots=4)
    task = asyncio.create_task(engine.run())
    async with AsyncExitStack() as stack:
        second = BatchClient(await stack.enter_async_context(batch_gateway(backend, served, "g2")))
        async with batch_gateway(backend, served, "g1", batch_concurrency=8) as http:
            batch_id = await BatchClient(http).begin([line(f"l{i}") for i in range(60)])

            async def begun() -> bool:
                counts = (await second.batch(batch_id))["request_counts"]
                return bool(counts["completed"] >= 4)

            await eventually(begun)
        batch = await second.ended(batch_id)
        output = await second.content(batch["output_file_id"])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert batch["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
    assert set(output) == {f"l{i}" for i in range(60)}
    assert len({one["response"]["body"]["id"] for one in output.values()}) == 60


async def test_a_file_that_is_not_a_batch_fails_it_with_every_fault(client: BatchClient) -> None:
    lines = [line("a"), line("a"), line("b", url="/v1/embeddings"), line("c", stream=True)]
    lines.append(line("d", messages=[[]] * Budget.containers))

    batch = await client.ended(await client.begin(lines))

    faults = [(fault["line"], fault["code"], fault["param"]) for fault in batch["errors"]["data"]]
    assert batch["status"] == "failed" and batch["failed_at"]
    assert faults == [
        (2, "duplicate_custom_id", "custom_id"),
        (3, "mismatched_endpoint", "url"),
        (4, "invalid_value", "body.stream"),
        (5, "request_too_complex", None),
    ]


async def test_results_beyond_the_limit_fail(
    backend: OverRedis, served: Models, engine: FakeEngine
) -> None:
    limits: dict[str, Any] = {"max_batch_output_bytes": 1024, "batch_concurrency": 1}
    async with batch_gateway(backend, served, "g1", **limits) as http:
        client = BatchClient(http)
        batch = await client.ended(await client.begin([line(f"l{i}") for i in range(10)]))
        errors = await client.content(batch["error_file_id"])

    assert 0 < batch["request_counts"]["completed"] < 10
    assert {one["error"]["code"] for one in errors.values()} == {"batch_output_too_large"}


@pytest.fixture
def book(tmp_path: Path) -> KeyBook:
    book = KeyBook(tmp_path / "keys.yaml")
    book.add("anna", tenant="a")
    book.add("bert", tenant="b")
    return book


@pytest.fixture
async def with_keys(
    backend: OverRedis, served: Models, book: KeyBook
) -> AsyncIterator[tuple[httpx.AsyncClient, KeyFile]]:
    file = KeyFile(book.path)
    async with batch_gateway(backend, served, "g1", keys=file) as http:
        yield http, file


async def test_tenants_see_only_their_own_files_and_batches(
    with_keys: tuple[httpx.AsyncClient, KeyFile], book: KeyBook, engine: FakeEngine
) -> None:
    anna, bert = (BatchClient(with_keys[0], **book.headers(name)) for name in ("anna", "bert"))
    batch = await anna.ended(await anna.begin([line("a")]))

    paths = [f"/v1/batches/{batch['id']}"]
    paths += [f"/v1/files/{batch[name]}" for name in ("input_file_id", "output_file_id")]
    paths += [f"{path}/content" for path in paths[1:]]
    for path in paths:
        assert (await anna.get(path)).status_code == 200
        assert (await bert.get(path)).status_code == 404
    for path in ("/v1/files", "/v1/batches"):
        assert (await anna.get(path)).json()["data"]
        assert (await bert.get(path)).json()["data"] == []
    assert (await bert.post(f"{paths[0]}/cancel")).status_code == 404
    assert (await bert.delete(paths[1])).status_code == 404
    body = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/completions"}
    stolen = await bert.post("/v1/batches", {**body, "completion_window": "24h"})
    assert stolen.status_code == 400 and stolen.json()["error"]["param"] == "input_file_id"


async def test_another_tenants_ids_are_not_found_on_any_path(
    with_keys: tuple[httpx.AsyncClient, KeyFile], book: KeyBook, engine: FakeEngine
) -> None:
    http = with_keys[0]
    anna, bert = (BatchClient(http, **book.headers(name)) for name in ("anna", "bert"))
    batch = await anna.ended(await anna.begin([line("a")]))
    response_request: dict[str, Any] = {"model": MODEL, "input": "x", "max_output_tokens": 3}
    response = await anna.post("/v1/responses", response_request)
    ids = {"batch_id": batch["id"], "file_id": batch["input_file_id"]}
    ids["response_id"] = response.json()["id"]
    ids["request_id"] = ids["response_id"].removeprefix("resp_")

    document = (await http.get("/openapi.json", headers=book.headers("anna"))).json()
    shared = ("{model_id}", "{engine_id}")  # stored without a tenant
    paths = [
        path
        for path in document["paths"]
        if "{" in path and not any(each in path for each in shared)
    ]
    assert len(paths) >= 9
    for path in paths:
        for method in document["paths"][path]:
            url = path.format(**ids)
            for name, status in (("bert", 404), *([("anna", 200)] if method == "get" else [])):
                answer = await http.request(method, url, headers=book.headers(name))
                assert answer.status_code == status, (method, path, name, answer.text)
    response_request["previous_response_id"] = ids["response_id"]
    refused = await bert.post("/v1/responses", response_request)
    assert refused.json()["error"]["code"] == "previous_response_not_found"


async def test_a_key_reads_no_data_of_models_that_it_may_not_use(
    with_keys: tuple[httpx.AsyncClient, KeyFile], book: KeyBook, engine: FakeEngine
) -> None:
    book.add("limited", tenant="a", models=["another"])
    book.add("same", tenant="a", models=["another", MODEL])
    with_keys[1].load()
    anna, limited, same = (
        BatchClient(with_keys[0], **book.headers(name)) for name in ("anna", "limited", "same")
    )
    lines = [line("a"), {**line("b"), "body": {"model": "unknown"}}]
    batch = await anna.ended(await anna.begin(lines))
    stored = await anna.http.post(
        "/v1/completions",
        json=line("x")["body"],
        headers={**book.headers("anna"), "idempotency-key": "key"},
    )
    response = await anna.post("/v1/responses", {"model": MODEL, "input": "Hi"})
    request = stored.headers["content-location"]
    files = [f"/v1/files/{batch[name]}" for name in ("output_file_id", "error_file_id")]
    paths = [request, f"{request}/events", f"/v1/responses/{response.json()['id']}", *files]
    paths += [f"/v1/batches/{batch['id']}", *(f"{path}/content" for path in files)]

    for path in paths:
        assert (await anna.get(path)).status_code == 200, path
        assert (await limited.get(path)).status_code == 404, path
    assert [(await same.get(path)).status_code for path in paths[:3]] == [200] * 3
    assert (await same.get(f"/v1/batches/{batch['id']}")).status_code == 404
    for path in (request, paths[2], *files):
        assert (await limited.delete(path)).status_code == 404
    assert (await limited.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 404
    assert (await limited.get("/v1/batches")).json()["data"] == []
    listed = (await limited.get("/v1/files")).json()["data"]
    assert [file["purpose"] for file in listed] == ["batch"]  # not read yet, so without a model
    own = await same.ended(await same.begin(lines))
    assert own["status"] == "completed" and own["output_file_id"]
    assert (await limited.get(f"/v1/files/{own['output_file_id']}")).status_code == 404
    follow = {"model": "another", "input": "Hi", "previous_response_id": response.json()["id"]}
    assert (await limited.post("/v1/responses", follow)).status_code in (400, 404)


async def test_a_revoked_key_runs_no_further_lines(
    backend: OverRedis, served: Models, book: KeyBook
) -> None:
    file = KeyFile(book.path)
    async with batch_gateway(backend, served, "g1", keys=file) as http:
        batch_id = await BatchClient(http, **book.headers("anna")).begin([line("a")])
    book.add("another", tenant="a")
    book.remove("anna")
    file.load()
    async with batch_gateway(backend, served, "g2", keys=file) as http:
        client = BatchClient(http, **book.headers("another"))
        batch = await client.ended(batch_id)
        (failed,) = (await client.content(batch["error_file_id"])).values()

    assert failed["error"]["code"] == "invalid_api_key"


async def test_a_request_without_a_key_is_refused(
    with_keys: tuple[httpx.AsyncClient, KeyFile],
) -> None:
    assert (await BatchClient(with_keys[0]).get("/v1/files")).status_code == 401


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, None),
        ({"whatever": 1}, "whatever"),
    ],
)
async def test_an_invalid_batch_is_refused_by_field(
    client: BatchClient, fields: dict[str, Any], param: str | None
) -> None:
    file = (await client.upload(jsonl([line("a")]))).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}

    answer = await client.post("/v1/batches", {**body, **fields})

    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == (param or "output_expires_after.seconds")


@pytest.mark.parametrize(
    ("content", "fields", "param"),
    [
        (b"", {}, "file"),
        (b"x", {"purpose": "assistants"}, "purpose"),
        (b"x", {"expires_after[seconds]": "9999"}, "expires_after"),
        (
            b"x",
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"},
            "expires_after",
        ),
        (b"x", {"colour": "red"}, "colour"),
    ],
)
async def test_an_invalid_file_is_refused_by_field(
    client: BatchClient, content: bytes, fields: dict[str, str], param: str
) -> None:
    answer = await client.upload(content, **fields)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_form_without_a_file_is_refused(client: BatchClient) -> None:
    form = {"files": {"purpose": (None, "batch")}}
    missing = await client.http.post("/v1/files", **form)  # type: ignore[arg-type]
    broken = await client.http.post(
        "/v1/files", content=b"no form", headers={"content-type": "multipart/form-data"}
    )
    wrong = await client.post("/v1/files", {"purpose": "batch"})

    assert missing.json()["error"]["param"] == "file" and missing.status_code == 400
    assert broken.status_code == 400 and "error" in broken.json()
    assert wrong.status_code == 415 and wrong.json()["error"]["code"] == "unsupported_media_type"


async def test_the_files_and_batches_of_a_tenant_are_limited(
    backend: OverRedis, served: Models
) -> None:
    limits: dict[str, Any] = {
        "max_file_bytes": 4096,
        "max_stored_bytes": 8192,
        "max_stored_files": 3,
        "max_open_batches": 1,
    }
    async with batch_gateway(backend, served, "g1", **limits) as http:
        client = BatchClient(http)
        too_large = await client.upload(b"x" * 4097)
        first, second = [(await client.upload(b"x" * 4000)).json() for _ in range(2)]
        over_bytes = await client.upload(b"x" * 4000)
        assert (await client.delete(f"/v1/files/{first['id']}")).status_code == 200
        assert (await client.delete(f"/v1/files/{second['id']}")).status_code == 200
        for _ in range(3):
            assert (await client.upload(b"x")).status_code == 200
        over_files = await client.upload(b"x")
        files = (await client.get("/v1/files")).json()["data"]
        body = {"input_file_id": files[0]["id"], "endpoint": "/v1/completions"}
        body["completion_window"] = "24h"
        begun = await client.post("/v1/batches", body)
        await client.ended(begun.json()["id"])
        await client.delete(f"/v1/files/{files[1]['id']}")
        await client.begin([line("a")])
        over_batches = await client.post("/v1/batches", body)

    assert too_large.status_code == 413
    assert [r.json()["error"]["code"] for r in (over_bytes, over_files)] == 2 * [
        "file_storage_full"
    ]
    assert over_batches.status_code == 429 and over_batches.headers["retry-after"] == "60"
    assert over_batches.json()["error"]["code"] == "too_many_batches"


async def test_lists_come_in_pages(client: BatchClient) -> None:
    ids = [(await client.upload(b"x")).json()["id"] for _ in range(5)]
    found: list[str] = []
    page = (await client.get("/v1/files", limit=2, order="asc")).json()
    while True:
        found += [item["id"] for item in page["data"]]
        if not page["has_more"]:
            break
        page = (await client.get("/v1/files", limit=2, order="asc", after=page["last_id"])).json()

    assert sorted(found) == sorted(ids)
    assert (await client.get("/v1/files", after="file-x")).json()["error"]["param"] == "after"
    assert (await client.get("/v1/files", limit=0)).json()["error"]["param"] == "limit"
    assert (await client.get("/v1/files", purpose="batch_output")).json()["data"] == []


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/v1/files/file-x", "file_not_found"),
        ("/v1/files/file-x/content", "file_not_found"),
        ("/v1/batches/batch_x", "batch_not_found"),
    ],
)
async def test_unknown_files_and_batches_are_404(client: BatchClient, path: str, code: str) -> None:
    answer = await client.get(path)

    assert answer.status_code == 404 and answer.json()["error"]["code"] == code


async def test_a_file_deleted_before_its_batch_begins_fails_it(
    backend: OverRedis, served: Models
) -> None:
    async with batch_gateway(backend, served, "g1", max_running_batches=1) as http:
        client = BatchClient(http)
        await client.begin([line("a")])
        file = (await client.upload(jsonl([line("b")]))).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
        second = (await client.post("/v1/batches", {**body, "completion_window": "1h"})).json()
        await client.delete(f"/v1/files/{file['id']}")
    async with batch_gateway(backend, served, "g2") as http:
        batch = await BatchClient(http).ended(second["id"])

    assert batch["status"] == "failed"
    assert batch["errors"]["data"][0]["code"] == "file_not_found"


async def test_only_the_files_of_an_ended_batch_are_left(
    client: BatchClient, engine: FakeEngine, backend: OverRedis
) -> None:
    batch_id = await client.begin([line("a")])
    await client.ended(batch_id)

    async def closed() -> bool:
        found = await backend.client.scan(f"b?:*{batch_id}*")
        return {key.decode() for key in found} <= {keys.batch(batch_id)}

    await eventually(closed)
    assert not await RedisBatches(backend.connect()).open()


async def test_lines_with_embeddings_keep_nothing_once_they_are_written(
    backend: OverRedis, served: Models, engine: FakeEngine
) -> None:
    """Only one of these lines may be kept at a time; the others wait for it."""
    lines = [line(f"l{i}", "/v1/embeddings", prompt=None, max_tokens=None) for i in range(2)]
    for one in lines:
        one["body"] = {"model": MODEL, "input": [[5, 6], [7]], "dimensions": 8}
    most = 3 * RECORD_BYTES
    async with batch_gateway(backend, served, "g1", max_kept_embedding_bytes=most) as http:
        client = BatchClient(http)

        batch = await client.ended(await client.begin(lines, endpoint="/v1/embeddings"))

        output = await client.content(batch["output_file_id"])
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    for result in output.values():
        assert len(result["response"]["body"]["data"]) == 2
    left = [name.decode() for name in await backend.client.command("KEYS", "*")]
    assert not [name for name in left if name.startswith("rq:")]
    records = [name for name in left if name.startswith("r:")]
    lives = [await backend.client.command("PTTL", name) for name in records]
    assert all(ms <= keys.FORGOTTEN_MS for ms in lives)
    used = await backend.accounts().used(f"s.{DEFAULT_TENANT}")
    assert used[ItemKind.LINE] == used[ItemKind.EMBEDDINGS] == used[ItemKind.REQUEST] == 0
