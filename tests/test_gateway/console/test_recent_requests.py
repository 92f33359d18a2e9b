"""Requests of several gateways in one list, for callers that may see them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.arbiter import Arbiter
from headrace_common.wire.messages import GenerateRequest
from headrace_gateway.console.recent_requests import STALE_S, RecentRequests
from headrace_gateway.limits.tenants import any_model
from headrace_gateway.queue_client.request_history import RequestHistory
from headrace_testing.backends import MODEL, make_request
from headrace_testing.waiting import eventually


@dataclass(slots=True)
class Clock:
    now: float = 1_700_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@dataclass(slots=True)
class Shared:
    """The shared requests of gateways, kept in memory, as one gateway sees them."""

    gateway_id: str
    written: dict[str, dict[str, bytes]]
    tenants: set[str]
    failure: BackendUnavailable | None = None
    reads: int = 0
    writes: int = 0
    looks: int = 0

    async def show(self, tenant: str, until: float) -> None:
        self.tenants.add(tenant)

    async def shown(self) -> Sequence[str]:
        self.looks += 1
        return list(self.tenants)

    async def write(self, tenant: str, content: bytes) -> None:
        self.writes += 1
        self.written.setdefault(tenant, {})[self.gateway_id] = content

    async def read(self, tenant: str) -> dict[str, bytes]:
        self.reads += 1
        if self.failure is not None:
            raise self.failure
        return self.written.get(tenant, {})


@dataclass(slots=True)
class Gateways:
    """Gateways that share a clock and a Redis."""

    clock: Clock = field(default_factory=Clock)
    written: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tenants: set[str] = field(default_factory=set)

    def add(self, name: str) -> tuple[RequestHistory, Shared, RecentRequests]:
        history, shared = RequestHistory(self.clock), Shared(name, self.written, self.tenants)
        return history, shared, RecentRequests(history, shared, self.clock)


@pytest.fixture
def gateways() -> Gateways:
    return Gateways()


def begin(history: RequestHistory, tenant: str = "t") -> GenerateRequest:
    request = replace(make_request(), tenant=tenant)
    history.begin(request, Arbiter(request.request_id, 1))
    return request


async def ids(
    recent: RecentRequests, tenant: str = "t", allows: Callable[[str], bool] = any_model
) -> list[str]:
    return [content["id"] for content in await recent.of(tenant, allows)]


async def test_the_newest_request_of_any_gateway_comes_first(gateways: Gateways) -> None:
    one, shared, recent = gateways.add("one")
    other, _, others = gateways.add("other")
    first = begin(other)
    second = begin(one)
    third = begin(other)
    assert await ids(recent) == [second.request_id]
    others.start()

    async def written() -> bool:
        return "t" in gateways.written

    await eventually(written)
    await others.close()
    gateways.clock.now += 2.0
    assert await ids(recent) == [each.request_id for each in (third, second, first)]
    assert shared.reads == 2


async def test_nothing_is_written_while_no_console_shows_it(gateways: Gateways) -> None:
    history, shared, recent = gateways.add("one")
    begin(history)
    recent.start()
    gateways.tenants.add("another")

    async def looked() -> bool:
        return shared.looks > 0

    await eventually(looked)
    await recent.close()
    assert (shared.writes, gateways.written) == (0, {})


async def test_a_tenant_sees_its_own_requests_for_models_of_its_key(gateways: Gateways) -> None:
    history, _, recent = gateways.add("one")
    own = begin(history, "t")
    begin(history, "u")
    assert await ids(recent) == [own.request_id]
    assert await ids(recent, allows=lambda name: name != MODEL) == []
    assert await ids(recent, "v") == []


async def test_many_consoles_cost_one_read(gateways: Gateways) -> None:
    _, shared, recent = gateways.add("one")
    for _ in range(5):
        await ids(recent)
    assert shared.reads == 1


async def test_the_gateway_that_knows_a_requests_end_takes_precedence(gateways: Gateways) -> None:
    history, _, recent = gateways.add("one")
    request = begin(history)
    (content,) = await recent.of("t", any_model)
    ended = {**content, "state": "finished"}
    body = {"at": gateways.clock(), "requests": [ended]}
    gateways.written["t"] = {"other": json.dumps(body).encode()}
    gateways.clock.now += 2.0
    (found,) = await recent.of("t", any_model)
    assert (found["id"], found["state"]) == (request.request_id, "finished")


@pytest.mark.parametrize(
    "data",
    [b"", b"x", b"[]", b"{}", b'{"at": "x", "requests": []}', b'{"at": 2e9, "requests": [{}]}'],
)
async def test_unreadable_entries_are_left_out(gateways: Gateways, data: bytes) -> None:
    history, _, recent = gateways.add("one")
    own = begin(history)
    gateways.written["t"] = {"other": data}
    assert await ids(recent) == [own.request_id]


async def test_entries_of_a_dead_gateway_expire(gateways: Gateways) -> None:
    other, _, others = gateways.add("other")
    begin(other)
    _, _, recent = gateways.add("one")
    body = {"at": gateways.clock(), "requests": await others.of("t", any_model)}
    gateways.written["t"] = {"other": json.dumps(body).encode()}
    assert len(await ids(recent)) == 1
    gateways.clock.now += STALE_S + 1
    assert await ids(recent) == []


async def test_without_redis_a_gateway_shows_its_own(gateways: Gateways) -> None:
    history, shared, recent = gateways.add("one")
    own = begin(history)
    shared.failure = BackendUnavailable("redis: away")
    assert await ids(recent) == [own.request_id]
