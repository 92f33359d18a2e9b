"""Limits on the bytes that a tenant stores in Redis; requests that store nothing are never
refused."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_common.config.api_keys import DEFAULT_TENANT
from headrace_common.protocol.accounts import Item, ItemKind, StoreMemory
from headrace_gateway.http.app import never_full
from headrace_gateway.limits.api_keys import KeyFile
from headrace_gateway.limits.tenant_stores import (
    MEASURE_S,
    RECORD_BYTES,
    WRITTEN_S,
    MemoryHeadroom,
    StoreLimits,
    TenantStores,
)
from headrace_gateway.models.models import Models
from headrace_gateway.telemetry.metrics import StoreScrapeCache
from headrace_testing.api_keys import KeyBook
from headrace_testing.backends import MODEL, Backend, OverRedis
from headrace_testing.batches import BatchClient, batch_gateway, line
from headrace_testing.fake_engine import FakeEngine
from headrace_testing.gateway_group import GatewayGroup
from headrace_testing.valkey import ValkeyServer
from headrace_testing.waiting import eventually

LIMITS = StoreLimits(
    tenant_bytes=1, requests=1, embedding_bytes=1, file_bytes=1, files=1, memory_share=1.0
)
ACCOUNT = f"s.{DEFAULT_TENANT}"
BODY = {"model": MODEL, "prompt": [5, 6], "max_tokens": 4}
LIMIT = 4 * RECORD_BYTES
MIB = 2**20
PLAIN_REQUESTS = int(os.environ.get("HEADRACE_TEST_PLAIN_REQUESTS", "200"))


@pytest.fixture
async def engine(backend: Backend) -> AsyncIterator[FakeEngine]:
    async for engine in running_engine(backend):
        yield engine


async def running_engine(backend: Backend) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(
        backend.engine(), MODEL, token_delay=0.0, beat_interval=0.2
    ).running() as engine:
        yield engine


async def ask(http: httpx.AsyncClient, key: str | None = None, **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"idempotency-key": key}
    return await http.post("/v1/completions", json={**BODY, **fields}, headers=headers)


async def fill(http: httpx.AsyncClient) -> tuple[int, httpx.Response]:
    """Stores requests until one is refused; returns their number and the refusal."""
    for number in range(100):
        answer = await ask(http, f"key {number}")
        if answer.status_code != 200:
            return number, answer
    raise AssertionError("there is no limit")


async def test_a_full_store_refuses_resumable_requests_and_still_serves_plain_ones(
    backend: Backend, served: Models, engine: FakeEngine
) -> None:
    group = GatewayGroup(backend, served, 60.0, max_tenant_store_bytes=LIMIT)
    async with group.gateway("g1") as http, group.gateway("g2") as other:
        stored, refused = await fill(http)
        elsewhere = await ask(other, "another key")
        again = await ask(other, "key 0")
        plain = [await ask(http) for _ in range(3)]

    assert 1 <= stored <= 3
    for each in (refused, elsewhere):
        assert (each.status_code, each.headers["x-should-retry"]) == (429, "false")
        assert 0 < int(each.headers["retry-after"]) <= 2 * 86_400
        error = each.json()["error"]
        assert error["code"] == "tenant_store_full"
        assert "max_tenant_store_bytes" in error["message"]
        assert "of stored requests" in error["message"]
    assert [each.status_code for each in (again, *plain)] == [200] * 4
    assert sum((await backend.accounts().used(ACCOUNT)).values()) <= LIMIT


async def test_the_number_of_stored_requests_is_limited(
    backend: Backend, served: Models, engine: FakeEngine
) -> None:
    group = GatewayGroup(backend, served, 60.0, max_stored_requests=2)
    async with group.gateway("g1") as http:
        stored, refused = await fill(http)

    assert stored == 2
    assert "2 stored requests (max_stored_requests)" in refused.json()["error"]["message"]


async def test_a_finished_request_counts_with_its_real_size(
    backend: Backend, served: Models, engine: FakeEngine
) -> None:
    """While a request runs, it counts with its largest possible size, so that no second one
    fits."""
    engine.freeze()
    group = GatewayGroup(backend, served, 60.0, max_tenant_store_bytes=20_000)
    async with group.gateway("g1") as http:
        first = asyncio.create_task(ask(http, "first", max_tokens=3000, stop_token_ids=[]))

        async def counted() -> bool:
            return (await backend.accounts().used(ACCOUNT))[ItemKind.REQUEST] > 3000 * 4

        await eventually(counted)
        refused = await ask(http, "second", max_tokens=3000)
        engine.script = lambda _request: [5, 6]
        engine.thaw()
        assert (await first).status_code == 200

        async def settled() -> bool:
            return (await backend.accounts().used(ACCOUNT))[ItemKind.REQUEST] < 3000

        await eventually(settled)
        second = await ask(http, "second", max_tokens=3000)

    assert refused.json()["error"]["code"] == "tenant_store_full"
    assert second.status_code == 200


async def test_a_request_larger_than_the_store_is_refused_without_retry(
    backend: Backend, served: Models, engine: FakeEngine
) -> None:
    group = GatewayGroup(backend, served, 60.0, max_tenant_store_bytes=RECORD_BYTES)
    async with group.gateway("g1") as http:
        refused = await ask(http, "key")

    assert (refused.status_code, refused.headers["x-should-retry"]) == (413, "false")
    assert refused.json()["error"]["code"] == "request_too_large"
    assert sum((await backend.accounts().used(ACCOUNT)).values()) == 0


async def test_a_stored_request_is_refused_after_three_gateways_ended_while_reading_it(
    backend: Backend, served: Models, engine: FakeEngine
) -> None:
    group, store = GatewayGroup(backend, served, 60.0), backend.request_store()
    async with group.gateway("g1") as http, group.gateway("g2") as other:
        made = await ask(http, "key")
        path = made.headers["content-location"]
        stored = await store.get(path.rpartition("/")[2])
        assert stored is not None
        for gateway in ("dead1", "dead2", "g2"):
            await store.begin_read(stored, gateway)
        read = await http.get(path)
        await store.begin_read(stored, "dead3")
        refused = [await http.get(path), await other.get(f"{path}/events"), await ask(http, "key")]
        await store.end_read(stored, "dead3")
        again = await http.get(path)
        plain = await ask(http)

    assert [each.status_code for each in (read, again, plain)] == [200] * 3
    for each in refused:
        assert (each.status_code, each.json()["error"]["code"]) == (500, "request_failed")
        assert each.headers["x-should-retry"] == "false"
    assert sorted(await store.begin_read(stored, "me")) == ["dead1", "dead2"]


async def test_a_deleted_response_no_longer_counts(
    backend: Backend, served: Models, engine: FakeEngine
) -> None:
    group = GatewayGroup(backend, served, 60.0)
    async with group.gateway("g1") as http:
        made = await http.post("/v1/responses", json={"model": MODEL, "input": "Hi"})
        before = await backend.accounts().used(ACCOUNT)
        deleted = await http.delete(f"/v1/responses/{made.json()['id']}")

    assert (made.status_code, deleted.status_code) == (200, 200)
    assert before[ItemKind.REQUEST] > RECORD_BYTES
    assert (await backend.accounts().used(ACCOUNT))[ItemKind.REQUEST] == 0


@pytest.fixture
def redis_backend(over_redis: OverRedis) -> OverRedis:
    return over_redis


async def test_files_batches_and_requests_share_one_store(
    redis_backend: OverRedis, served: Models
) -> None:
    async with batch_gateway(redis_backend, served, "g1", max_tenant_store_bytes=20_000) as http:
        client = BatchClient(http)
        file = (await client.upload(b"x" * 18_000)).json()["id"]
        refused = [await client.upload(b"x" * 5000), await ask(http, "key", max_tokens=500)]
        await client.delete(f"/v1/files/{file}")
        begun = await client.begin([line("a")])
        used = await redis_backend.accounts().used(ACCOUNT)

    assert [each.json()["error"]["code"] for each in refused] == ["tenant_store_full"] * 2
    assert begun and used[ItemKind.FILE] < 1000 and used[ItemKind.BATCH] > RECORD_BYTES


async def test_lines_of_a_batch_fail_if_their_tenants_store_is_full(
    redis_backend: OverRedis, served: Models
) -> None:
    """They fail at once, with the reason: stored data expires too late to wait for it."""
    async with batch_gateway(redis_backend, served, "g1", max_tenant_store_bytes=20_000) as http:
        client = BatchClient(http)
        await client.upload(b"x" * 15_500)
        batch = await client.ended(await client.begin([line("a")]))
        errors = await client.content(batch["error_file_id"])

    assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    assert errors["a"]["response"]["status_code"] == 429
    assert errors["a"]["response"]["body"]["error"]["code"] == "tenant_store_full"


async def test_a_batch_counts_its_results_until_they_are_files(
    redis_backend: OverRedis, served: Models
) -> None:
    async for _ in running_engine(redis_backend):
        async with batch_gateway(redis_backend, served, "g1") as http:
            client = BatchClient(http)
            batch = await client.ended(await client.begin([line("a"), line("b")]))
            output = (await client.get(f"/v1/files/{batch['output_file_id']}")).json()
            given = (await client.get(f"/v1/files/{batch['input_file_id']}")).json()

            async def closed() -> bool:
                used = await redis_backend.accounts().used(ACCOUNT)
                return used[ItemKind.BATCH] < 2 * RECORD_BYTES

            await eventually(closed)
            used = await redis_backend.accounts().used(ACCOUNT)

    assert used[ItemKind.FILE] == output["bytes"] + given["bytes"]
    assert used[ItemKind.LINE] == used[ItemKind.REQUEST] == 0


async def test_metrics_read_the_stored_bytes_of_each_tenant(backend: Backend) -> None:
    later = int((time.time() + 60) * 1000)
    stores = TenantStores(backend.accounts(), LIMITS, never_full)
    for tenant, size in (("a", 10), ("b", 20), ("a", 1)):
        await stores.count(tenant, Item(ItemKind.FILE, f"{size}", size, later))
    loop = asyncio.get_running_loop()

    cache = StoreScrapeCache(stores, lambda: {"b", "a", "c"}, loop)

    assert await asyncio.to_thread(cache.current) == [("a", 11), ("b", 20), ("c", 0)]


async def test_headroom_subtracts_bytes_taken_since_the_measurement() -> None:
    now, used = 100.0, 0

    async def read() -> StoreMemory:
        return StoreMemory(used, 100)

    headroom = MemoryHeadroom(read, 0.6, lambda: now)
    taken = await asyncio.gather(*(headroom.take(20) for _ in range(5)))
    used = 60
    now += WRITTEN_S
    full = await headroom.take(1)
    used = 50
    soon = await headroom.take(1)
    now += MEASURE_S
    later = await headroom.take(10)

    assert taken == [True] * 3 + [False] * 2
    assert (full, soon, later) == (False, False, True)


@pytest.fixture
async def small_redis(tmp_path: Path) -> AsyncIterator[OverRedis]:
    """A Redis of 24 MiB."""
    server = ValkeyServer(tmp_path / "small", "--maxmemory", "24mb", appendonly=False)
    server.start()
    redis_backend = OverRedis(server.url, block=0.2)
    yield redis_backend
    await redis_backend.close()
    server.kill()


@pytest.mark.parametrize("quota", [4 * MIB, 1024 * MIB], ids=["quota", "no quota"])
async def test_other_tenants_are_answered_while_one_tenant_fills_redis(
    small_redis: OverRedis, served: Models, tmp_path: Path, quota: int
) -> None:
    """The tenant keeps uploading during the test. Without a quota, the limit on Redis' memory stops
    it."""
    book = KeyBook(tmp_path / "keys.yaml")
    for name in ("greedy", "other"):
        book.add(name, tenant=name)
    keys = KeyFile(book.path)
    fields: dict[str, Any] = {"max_tenant_store_bytes": quota, "max_stored_bytes": quota}
    full, done = asyncio.Event(), asyncio.Event()

    async def greed(client: BatchClient) -> list[httpx.Response]:
        files = [client.upload(b"x" * MIB) for _ in range(48)]
        answers = list(await asyncio.gather(*files))
        full.set()
        while not done.is_set():
            answers.append(await client.upload(b"x" * MIB))
        return answers

    async def plain(http: httpx.AsyncClient) -> list[int]:
        one = [ask(http, max_tokens=1) for _ in range(20)]
        return [answer.status_code for answer in await asyncio.gather(*one)]

    async for _ in running_engine(small_redis):
        async with batch_gateway(small_redis, served, "g1", keys=keys, **fields) as http:
            greedy = asyncio.create_task(greed(BatchClient(http, **book.headers("greedy"))))
            http.headers.update(book.headers("other"))
            await full.wait()
            statuses = [status for _ in range(PLAIN_REQUESTS // 20) for status in await plain(http)]
            done.set()
            uploads = await greedy

    refused = {(a.status_code, a.json()["error"]["code"]) for a in uploads if a.status_code != 200}
    assert refused == {(429, "tenant_store_full") if quota < 24 * MIB else (503, "store_full")}
    assert statuses == [200] * PLAIN_REQUESTS
