"""The chart's Redis users may do what their roles need, and nothing else.

The contract tests run with these users, too.
"""

from collections.abc import AsyncIterator

import pytest
from redis.exceptions import NoPermissionError, ResponseError

from headrace_common.protocol.adapters import AdapterSet, new_adapter
from headrace_common.protocol.base import QueueLimits
from headrace_common.protocol.batches import BatchRequest
from headrace_common.protocol.limits import Rates, Settlement
from headrace_common.protocol.redis.adapters import RedisAdapterSets
from headrace_common.protocol.redis.batches import RedisBatches
from headrace_common.protocol.redis.client.connection import check_backend
from headrace_common.protocol.redis.gateway import RedisGatewayQueue
from headrace_common.protocol.redis.limits import RedisKeyUsage
from headrace_common.protocol.redis.registry import RedisModelRegistry
from headrace_common.protocol.registry import RegisteredModel, digest_of
from headrace_common.wire.keys import adapter_set
from headrace_common.wire.messages import Drain
from headrace_testing.backends import MODEL, make_request, make_status
from headrace_testing.redis_users import ROLES, OverUsers
from headrace_testing.valkey import ValkeyServer
from headrace_testing.waiting import first

FILES = {"config.json": b"{}"}
KNOWN = RegisteredModel(
    name=MODEL, digest=digest_of(FILES), max_model_len=8, created=1, owner="ns/m"
)
TAKE = ("XREADGROUP", "GROUP", "e", "x", "STREAMS", "q:{m.0}:n", ">")


@pytest.fixture
async def redis_backend(user_server: ValkeyServer) -> AsyncIterator[OverUsers]:
    redis_backend = OverUsers(user_server)
    await redis_backend.wipe()
    yield redis_backend
    await redis_backend.close()


@pytest.mark.parametrize("role", ["gateway", "engine"])
async def test_a_role_passes_the_check_at_start(redis_backend: OverUsers, role: str) -> None:
    await check_backend(redis_backend.connect(role))


async def test_a_model_is_registered_read_and_removed_by_its_roles(
    redis_backend: OverUsers,
) -> None:
    as_role = {role: RedisModelRegistry(redis_backend.connect(role)) for role in ROLES}
    await as_role["engine"].register(KNOWN, FILES)
    assert await as_role["gateway"].models() == {MODEL: KNOWN}
    assert await as_role["gateway"].files(KNOWN) == FILES
    assert await as_role["operator"].remove(MODEL, "ns/m")
    assert await as_role["gateway"].models() == {}


async def test_the_operator_writes_the_adapters_of_a_model(redis_backend: OverUsers) -> None:
    connection = redis_backend.connect("operator")
    sets = RedisAdapterSets(connection)
    await connection.measure_clock(adapter_set(MODEL))
    wanted = AdapterSet(version="1", adapters=(new_adapter("sql", "/model/sql", "ns/m", 0.0),))
    assert await sets.replace(MODEL, AdapterSet(), wanted)
    assert await sets.read(MODEL) == wanted


async def test_the_operator_sees_engines_and_drains_one(redis_backend: OverUsers) -> None:
    engine, operator = (
        redis_backend.engine(),
        RedisGatewayQueue(redis_backend.connect("operator"), "operator"),
    )
    await engine.beat([], make_status())
    assert await operator.engines(MODEL) == [make_status()]
    await operator.send("e", MODEL, Drain())
    assert await first(engine.controls(), 1) == [Drain()]
    await engine.close()
    assert await operator.engines(MODEL) == []


async def test_lines_of_batches_are_started_and_ended_by_gateways(redis_backend: OverUsers) -> None:
    batches = RedisBatches(redis_backend.connect("gateway"))
    batch = await batches.create(
        BatchRequest(
            id="b",
            tenant="t",
            key_id="",
            endpoint="/v1/completions",
            input_file_id="f",
            completion_window="24h",
            created_at=1,
            expires_at=4_000_000_000,
            output_ttl=1,
            kept_until=4_000_000_000,
        )
    )
    await batches.start(batch, 1, "g")
    assert await batches.starters(batch) == {1: {"g"}}
    await batches.keep(batch, 1, b"{}", answered=True, starters=["g"])
    assert await batches.starters(batch) == {}
    assert await batches.close(batch)


async def test_limits_of_api_keys_are_kept_by_gateways(redis_backend: OverUsers) -> None:
    usage = RedisKeyUsage(redis_backend.connect("gateway"))
    rates = Rates(requests=2, concurrency=1)
    assert (await usage.reserve("k", "r", rates, 1)).refused is None
    await usage.renew("k", ["r"])
    await usage.settle("k", "r", rates, Settlement(reserved=1, used=1, duration_ms=1))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("KEYS", "*"),
        ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"),
        ("ACL", "LIST"),
        ("SHUTDOWN",),
        ("REPLICAOF", "NO", "ONE"),
        ("SCRIPT", "FLUSH"),
        ("MONITOR",),
        ("GET", "another"),
        ("SET", "another", "x"),
        ("EVAL", "return redis.call('FLUSHALL')", 0),
        ("EVAL", "return redis.call('GET', 'another')", 0),
    ],
    ids=lambda command: " ".join(map(str, command)),
)
async def test_commands_that_no_role_may_run_are_refused(
    redis_backend: OverUsers, role: str, command: tuple[str | int, ...]
) -> None:
    client = redis_backend.connect(role).client
    with pytest.raises(ResponseError, match="(?i)no permission|ACL failure|NOPERM"):
        await client.command(*command)


@pytest.mark.parametrize(
    ("role", "command"),
    [
        ("engine", ("HDEL", "m:{m}", MODEL)),
        ("engine", ("GET", "rk:{rk}")),
        ("engine", ("HGETALL", "ku:{k.key}")),
        ("engine", ("HGETALL", "rq:{id}")),
        ("gateway", ("HDEL", "m:{m}", MODEL)),
        ("operator", ("GET", "p:{m.0}:id")),
        ("operator", ("HGETALL", "j:{m.0}:id")),
        ("operator", TAKE),
        ("operator", ("SET", "r:{m.0}:id", "x")),
    ],
)
async def test_a_role_may_not_touch_the_keys_of_another(
    redis_backend: OverUsers, role: str, command: tuple[str, ...]
) -> None:
    await redis_backend.gateway().admit(make_request(), QueueLimits())
    with pytest.raises(NoPermissionError):
        await redis_backend.connect(role).client.command(*command)
