"""/v1/embeddings with an Idempotency-Key, through two gateways on one queue.

The fake engine makes random vectors: an input that is computed again gets other bytes.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from headrace_common.errors import FailureCode
from headrace_common.protocol.base import Lease, Outcome, QueueLimits
from headrace_common.wire.messages import Failed, GenerateRequest
from headrace_gateway.limits.tenant_stores import RECORD_BYTES
from headrace_gateway.models.models import Models
from headrace_gateway.resumable.embedding_batch import IN_FLIGHT
from headrace_testing.backends import MODEL, Backend
from headrace_testing.fake_engine import FakeEngine
from headrace_testing.gateway_group import GatewayGroup
from headrace_testing.waiting import eventually

KEY = {"idempotency-key": "the key"}
in_memory = pytest.mark.parametrize("backend", ["memory"], indirect=True)


class Runs:
    """The requests that an engine has begun; the engine freezes after `most` requests."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.begun: Counter[str] = Counter()
        self.most: int | None = None
        engine.script = self._script

    def _script(self, request: GenerateRequest) -> Sequence[int]:
        self.begun[request.request_id] += 1
        if self.most is not None and self.begun.total() >= self.most:
            self.engine.freeze()
        return ()

    async def frozen(self) -> bool:
        return self.most is not None and self.begun.total() >= self.most

    @property
    def where(self) -> str:
        """The path of the request that has started."""
        return f"/v1/requests/{next(iter(self.begun)).split('.')[1]}"

    def thaw(self) -> None:
        self.most = None
        self.engine.thaw()


@pytest.fixture
def max_bytes() -> int:
    return 2**24


@pytest.fixture
async def group(backend: Backend, served: Models, window: float, max_bytes: int) -> GatewayGroup:
    return GatewayGroup(backend, served, window, max_kept_embedding_bytes=max_bytes)


@pytest.fixture
async def gateways(group: GatewayGroup) -> AsyncIterator[list[httpx.AsyncClient]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(group.gateway(name)) for name in ("g1", "g2")]


@pytest.fixture
async def runs(backend: Backend) -> AsyncIterator[Runs]:
    async with FakeEngine(
        backend.engine(), MODEL, slots=8, token_delay=0.001, beat_interval=0.2
    ).running() as engine:
        yield Runs(engine)


def inputs(count: int) -> list[list[int]]:
    return [[5, 6, 7 + number % 8] for number in range(count)]


async def ask(http: httpx.AsyncClient, count: int, key: str = "the key", **fields: Any) -> Any:
    body = {"model": MODEL, "input": inputs(count), "encoding_format": "base64", **fields}
    return await http.post("/v1/embeddings", json=body, headers={"idempotency-key": key})


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_a_retry_at_any_gateway_gets_the_same_bytes_and_computes_nothing(
    gateways: list[httpx.AsyncClient], runs: Runs, encoding: str
) -> None:
    first = await ask(gateways[0], 3, encoding_format=encoding)

    again = [await ask(http, 3, encoding_format=encoding) for http in gateways]

    assert [each.content for each in again] == [first.content] * 2
    assert runs.begun.total() == 3
    where = first.headers["content-location"]
    seen = (await gateways[1].get(where)).json()
    assert (seen["status"], seen["operation"]) == ("completed", "embeddings")
    assert seen["result"] == first.json() and seen["error"] is None
    assert seen["expires_at"] > seen["created_at"] + 86_400


async def test_many_clients_with_one_key_make_each_vector_once(
    gateways: list[httpx.AsyncClient], runs: Runs
) -> None:
    count = IN_FLIGHT + 16

    answers = await asyncio.gather(*(ask(gateways[i % 2], count) for i in range(6)))

    assert [answer.status_code for answer in answers] == [200] * 6
    assert len({answer.content for answer in answers}) == 1
    assert len(runs.begun) == count


async def test_another_gateway_continues_where_one_has_stopped(
    group: GatewayGroup, runs: Runs
) -> None:
    count = IN_FLIGHT + 36
    runs.most = 30
    async with group.gateway("g2") as other:
        async with group.gateway("g1") as first:
            asking = asyncio.create_task(ask(first, count))
            await eventually(runs.frozen)
            asking.cancel()
        begun = set(runs.begun)
        runs.thaw()

        answer = await ask(other, count)

    assert answer.status_code == 200 and len(answer.json()["data"]) == count
    assert len(runs.begun) == count and begun < set(runs.begun)


@pytest.mark.parametrize("window", [0.05])
async def test_a_request_whose_client_does_not_return_is_cancelled_and_keeps_its_vectors(
    gateways: list[httpx.AsyncClient], group: GatewayGroup, runs: Runs
) -> None:
    """Without a client, no further inputs are queued."""
    count, runs.most = IN_FLIGHT + 36, 30
    asking = asyncio.create_task(ask(gateways[0], count))
    await eventually(runs.frozen)
    asking.cancel()

    async def cancelled() -> bool:
        seen = (await gateways[1].get(runs.where)).json()
        return bool(seen["status"] == "cancelled")

    await eventually(cancelled)
    runs.thaw()
    await eventually(group.is_idle)
    before = set(runs.begun)
    done = await finished(group, before)

    answer = await ask(gateways[1], count)

    assert answer.status_code == 200
    after = {name for name, times in runs.begun.items() if times > 1 or name not in before}
    assert not done & after
    assert len(after) == count - len(done)


async def finished(group: GatewayGroup, ids: set[str]) -> set[str]:
    """The ids of the requests that have a vector."""
    queue = group.backend.gateway("observer")
    found = {rid: await queue.request_status(rid, MODEL) for rid in ids}
    return {
        rid
        for rid, request_status in found.items()
        if request_status is not None
        and request_status.outcome is not None
        and request_status.outcome.choices
    }


@in_memory
async def test_delete_ends_a_request_at_any_gateway(
    gateways: list[httpx.AsyncClient], group: GatewayGroup, runs: Runs
) -> None:
    runs.most = 30
    asking = asyncio.create_task(ask(gateways[0], IN_FLIGHT + 36))
    await eventually(runs.frozen)
    seen = (await gateways[1].get(runs.where)).json()
    assert (seen["status"], seen["result"]) == ("in_progress", None)

    deleted = await gateways[1].delete(runs.where)

    assert deleted.json()["status"] == "cancelled"
    runs.thaw()
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
    await eventually(group.is_idle)
    assert len(runs.begun) < IN_FLIGHT + 36


@in_memory
async def test_a_key_is_for_one_body(gateways: list[httpx.AsyncClient], runs: Runs) -> None:
    first = await ask(gateways[0], 1)

    for refused in (
        await ask(gateways[1], 2),
        await ask(gateways[1], 1, encoding_format="float"),
        await gateways[1].post("/v1/completions", json={"prompt": [5]}, headers=KEY),
    ):
        assert refused.status_code == 422
        assert refused.json()["error"]["code"] == "idempotency_key_reused"
    assert (await ask(gateways[1], 1, user=None)).content == first.content
    assert (await ask(gateways[1], 1, key="another")).content != first.content


@pytest.mark.parametrize("max_bytes", [3 * (32 + 12 + RECORD_BYTES)])
async def test_the_stored_bytes_of_a_tenant_are_limited(
    gateways: list[httpx.AsyncClient], runs: Runs
) -> None:
    """The limit fits three requests with a vector of 8 numbers, a prompt of 3 tokens, and what is
    stored with them."""
    fields: dict[str, Any] = {"dimensions": 8}
    first = await ask(gateways[0], 2, **fields)

    second = await ask(gateways[1], 2, "second", **fields)
    large = await ask(gateways[1], 4, "third", **fields)

    assert (second.status_code, second.headers["x-should-retry"]) == (429, "false")
    assert second.json()["error"]["code"] == "kept_embeddings_full"
    assert (large.status_code, large.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert (await ask(gateways[1], 2, **fields)).content == first.content
    assert (await ask(gateways[1], 1, "second", **fields)).status_code == 200
    plain = {"model": MODEL, "input": inputs(4)}
    assert (await gateways[0].post("/v1/embeddings", json=plain)).status_code == 200


@in_memory
async def test_a_request_that_the_queue_refuses_leaves_no_stored_data(
    group: GatewayGroup, max_bytes: int
) -> None:
    group.limits = QueueLimits(max_requests=0)
    async with group.gateway("g1") as http:
        refused = await ask(http, 2)
        assert refused.status_code == 503

        again = await ask(http, 1)

    assert (again.status_code, again.json()["error"]["code"]) == (503, "queue_full")


async def test_a_failure_that_would_come_again_is_the_outcome(
    gateways: list[httpx.AsyncClient], backend: Backend
) -> None:
    probe = backend.engine("probe")
    await probe.start()
    asking = asyncio.create_task(ask(gateways[0], 2))
    leases: list[Lease] = []

    async def taken() -> bool:
        leases.extend(await probe.take(2))
        return len(leases) == 2

    await eventually(taken)
    lease = leases[0]
    rid = lease.request.request_id
    why = FailureCode.INVALID
    failed = Failed(request_id=rid, attempt=lease.attempt, failure=why, message="it makes text")
    await probe.finish(rid, lease.attempt, Outcome(failed=failed))

    answers = [await asking, await ask(gateways[1], 2)]

    assert [each.status_code for each in answers] == [400, 400]
    assert all("it makes text" in each.json()["error"]["message"] for each in answers)
    assert (await backend.gateway("observer").depth(MODEL)).waiting == 0


@in_memory
@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-resumable": "true"}, "x-resumable"),
        ({**KEY, "last-event-id": "x"}, "Last-Event-ID"),
        ({"idempotency-key": "é"}, "Idempotency-Key"),
    ],
)
async def test_headers_without_a_meaning_for_embeddings_are_refused(
    gateways: list[httpx.AsyncClient], headers: dict[str, str], param: str
) -> None:
    body = {"model": MODEL, "input": "x"}
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]

    refused = await gateways[0].post("/v1/embeddings", json=body, headers=sent)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@in_memory
async def test_embeddings_have_no_events(gateways: list[httpx.AsyncClient], runs: Runs) -> None:
    where = (await ask(gateways[0], 1)).headers["content-location"]

    refused = await gateways[1].get(f"{where}/events")

    assert refused.status_code == 400 and where in refused.json()["error"]["message"]
