"""An engine with a Redis user for its model cannot harm other models or gateways.

The keys are those of the table of keys and users; the commands are those of the server.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import redis
from redis.exceptions import NoPermissionError, ResponseError

from headrace_common.errors import BackendUnfit
from headrace_common.protocol.adapters import AdapterReport, AdapterSet, new_adapter
from headrace_common.protocol.frames import encode_control
from headrace_common.protocol.redis.adapters import RedisAdapterSets
from headrace_common.protocol.redis.client.client import Command
from headrace_common.protocol.redis.registry import RedisModelRegistry
from headrace_common.protocol.redis.slots import RedisSlot
from headrace_common.protocol.redis.users import KEYS, ROLES, KeyScope, model_rules, role_line
from headrace_common.protocol.registry import (
    RegisteredModel,
    RegistrationGrant,
    RegistryError,
    digest_of,
)
from headrace_common.protocol.slots import SlotAction
from headrace_common.protocol.status import encode_status
from headrace_common.sealing.keyring import Keyring, new_key
from headrace_common.wire import keys
from headrace_common.wire.keys import ShardKeys
from headrace_common.wire.messages import Cancel
from headrace_testing.backends import MODEL, make_request, make_status
from headrace_testing.charts import ROOT
from headrace_testing.queue_contract import LIMITS, tokens
from headrace_testing.redis_users import ACL, OTHER, OverUsers
from headrace_testing.strangers import all_tries, commands, keys_of, names_of
from headrace_testing.valkey import ValkeyServer
from headrace_testing.waiting import first

FILES = {"config.json": b"{}"}
# Names that begin or end like MODEL, with characters that have a meaning in patterns.
ALIKE = tuple(f"{MODEL}{end}" for end in (".0", ".1", "0", ":1", "*", "}")) + (
    f"x:{MODEL}",
    f"{{{MODEL}",
)


def model(name: str = MODEL, **more: Any) -> RegisteredModel:
    fields = {"digest": digest_of(FILES), "max_model_len": 8, "created": 1, "owner": "ns/stranger"}
    return RegisteredModel(name=name, **{**fields, **more})


@pytest.fixture
async def redis_backend(user_server: ValkeyServer) -> AsyncIterator[OverUsers]:
    redis_backend = OverUsers(user_server, engine=MODEL)
    await redis_backend.wipe()
    yield redis_backend
    await redis_backend.close()


async def test_every_command_on_every_key_of_others_is_refused(
    redis_backend: OverUsers, user_server: ValkeyServer
) -> None:
    with redis.Redis(port=user_server.port, protocol=2) as client:
        found = commands(client)
    others = keys_of(OTHER)
    alike = [key for name in ALIKE for key in keys_of(name)]
    tries = all_tries(found, others) + all_tries([("get", "KEY")], alike)
    results = await redis_backend.connect("engine").client.pipeline(tries, raise_on_error=False)
    allowed = [
        (command, result)
        for command, result in zip(tries, results, strict=True)
        if not isinstance(result, NoPermissionError)
    ]
    assert allowed == []
    assert len(found) > 150 and len(others) > 60


async def test_every_command_on_every_key_of_others_is_refused_to_scripts(
    redis_backend: OverUsers, user_server: ValkeyServer
) -> None:
    with redis.Redis(port=user_server.port, protocol=2) as client:
        found = commands(client)
    names = keys_of(OTHER)
    script = "return redis.call(unpack(ARGV))"
    tries: list[Command] = [("EVAL", script, 0, *each) for each in all_tries(found, names)]
    results = await redis_backend.connect("engine").client.pipeline(tries, raise_on_error=False)
    refusal = re.compile("(?i)NOPERM|no permission|ACL failure|not allowed from script|unknown")
    allowed = [
        (command, result)
        for command, result in zip(tries, results, strict=True)
        if not (isinstance(result, ResponseError) and refusal.search(str(result)))
    ]
    assert allowed == []


async def test_a_models_keys_can_be_used_by_its_engines(redis_backend: OverUsers) -> None:
    client = redis_backend.connect("engine").client
    for rule in KEYS:
        if rule.place not in (KeyScope.NOWHERE, KeyScope.READ, KeyScope.OF_GROUP):
            *_, own = names_of(rule, MODEL)
            await client.command("EXISTS", own)
            if rule.read_only:
                with pytest.raises(ResponseError, match="No permissions"):
                    await client.command("DEL", own)
            else:
                await client.command("DEL", own)


async def test_engines_of_a_group_can_use_its_slot_and_no_other(
    redis_backend: OverUsers,
) -> None:
    rules = model_rules(MODEL, "ns/gpu")
    await redis_backend.client.command("ACL SETUSER", "sharing", "on", ">secret", *rules)
    connection = redis_backend.connect()
    await connection.client.command("AUTH", "sharing", "secret")
    try:
        slot = RedisSlot(connection, "ns/gpu", "e", MODEL)
        assert await slot.demand() is None
        assert (await slot.act(SlotAction.TAKE, None)).turn.holder == "e"
        for other in ("ns/gpu2", "other/gpu", "*"):
            with pytest.raises(BackendUnfit):
                await RedisSlot(connection, other, "e", MODEL).act(SlotAction.TAKE, None)
    finally:
        await redis_backend.client.command("ACL DELUSER", "sharing")


async def test_shared_keys_can_be_read_but_not_written(redis_backend: OverUsers) -> None:
    await redis_backend.client.command("SET", keys.SEALING_CHECK, "sealed")
    client = redis_backend.connect("engine").client
    assert await client.command("GET", keys.SEALING_CHECK) == b"sealed"
    for command in (("SET", keys.SEALING_CHECK, "x"), ("DEL", keys.SEALING_CHECK)):
        with pytest.raises(NoPermissionError):
            await client.command(*command)


async def test_an_engine_with_its_own_user_serves_sealed_requests(
    user_server: ValkeyServer, redis_backend: OverUsers
) -> None:
    sealed = OverUsers(user_server, engine=MODEL, ring=Keyring([new_key()]))
    engine, gateway = sealed.engine(), sealed.gateway()
    await engine.start()
    await gateway.start()
    await gateway.admit(make_request(), LIMITS)
    (lease,) = await engine.take(1)
    await engine.publish({"g": [tokens(lease, 0, 1)]})
    assert (await first(gateway.frames(), 1))[0].replies == (tokens(lease, 0, 1),)
    await sealed.close()


def test_every_key_of_the_protocol_is_in_the_table() -> None:
    page = (ROOT / "docs/protocol.md").read_text().partition("## Keys")[2].partition("\n### ")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    written = {name for row in rows for name in re.findall(r"`([a-z]+):", row)}
    assert written == {rule.prefix for rule in KEYS}


@pytest.mark.parametrize("role", ROLES)
def test_the_charts_files_are_made_from_the_table(role: str) -> None:
    assert (ACL / f"{role}.acl").read_text() == role_line(role) + "\n"


async def test_an_engine_registers_only_the_model_it_was_granted(redis_backend: OverUsers) -> None:
    gateway = RedisModelRegistry(redis_backend.connect("gateway"))
    engine = RedisModelRegistry(redis_backend.connect("engine"))
    operator = RedisModelRegistry(redis_backend.connect("operator"))
    await engine.register(model(adapters=("a",)), FILES)
    assert await gateway.models() == {}
    await operator.grant(MODEL, RegistrationGrant(owner="ns/m", adapters=("a",)))
    granted = model(owner="ns/m", adapters=("a",))
    assert await gateway.models() == {MODEL: granted}
    assert await gateway.files(granted) == FILES
    assert await engine.registered(MODEL) == model(adapters=("a",))
    assert not await operator.remove(MODEL, "ns/another")
    assert await operator.remove(MODEL, "ns/m")
    assert await gateway.models() == {}
    assert await redis_backend.client.command("KEYS", "m*") == [keys.GRANTS.encode()]


async def test_grants_survive_the_loss_of_redis_data(redis_backend: OverUsers) -> None:
    gateway = RedisModelRegistry(redis_backend.connect("gateway"))
    await gateway.grant(MODEL, RegistrationGrant(owner="ns/m"))
    store = (await gateway.models()).store
    await redis_backend.wipe()
    await RedisModelRegistry(redis_backend.connect("engine")).register(model(), FILES)
    found = await gateway.models()
    assert found == {MODEL: model(owner="ns/m")} and found.store not in (store, "")


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        ("another model's", "name", OTHER),
        ("not granted", "adapters", [OTHER]),
        ("digest must be", "digest", "x:y"),
        ("max_model_len", "max_model_len", 2**62),
        ("created must be", "created", -1),
        ("another type", "owner", ["ns/m"]),
        ("over 65536", "adapters", ["a" * 1000] * 100),
    ],
)
async def test_registrations_of_engines_are_checked_as_untrusted_input(
    redis_backend: OverUsers,
    caplog: pytest.LogCaptureFixture,
    message: str,
    field: str,
    value: object,
) -> None:
    gateway, client = (
        RedisModelRegistry(redis_backend.connect("gateway")),
        redis_backend.connect("engine").client,
    )
    await gateway.grant(MODEL, RegistrationGrant(owner="ns/m"))
    entry = {"name": MODEL, "digest": digest_of(FILES), "max_model_len": 8, "created": 1}
    data = msgpack.packb({**entry, "owner": "", "adapters": [], field: value})
    await client.command("HSET", keys.granted_model(MODEL), "e", data)
    assert await gateway.models() == {}
    assert message in caplog.records[-1].__dict__["error"]


async def test_files_that_are_too_large_are_not_read(
    redis_backend: OverUsers, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, engine = (
        RedisModelRegistry(redis_backend.connect(role)) for role in ("gateway", "engine")
    )
    await gateway.grant(MODEL, RegistrationGrant(owner="ns/m"))
    await engine.register(model(), FILES)
    monkeypatch.setattr("headrace_common.protocol.redis.registry.MAX_PACKED_BYTES", 3)
    found = (await gateway.models())[MODEL]
    with pytest.raises(RegistryError, match="over 3"):
        await gateway.files(found)


async def test_an_engine_of_a_model_reads_control_messages_from_its_own_stream(
    redis_backend: OverUsers,
) -> None:
    control = Cancel(request_id="0.r")
    await redis_backend.gateway().send("e", MODEL, control)
    key = keys.shared_controls("e")
    await redis_backend.client.command(
        "XADD", key, "*", "c", encode_control(Cancel(request_id="0.x"))
    )
    assert await first(redis_backend.engine().controls(), 1) == [control]


MALFORMED: list[Command] = [
    ("SET", ShardKeys(MODEL).engines, "x"),
    ("SET", ShardKeys(MODEL).status("e"), "x" * 100_000),
    ("SET", ShardKeys(MODEL).status("e"), encode_status(replace(make_status(), model=OTHER))),
    ("SET", ShardKeys(MODEL).status("e"), encode_status(replace(make_status(), shards=2**40))),
    ("HSET", ShardKeys(MODEL).stats, "sh", 2**40, "su", 2**60),
    ("HSET", ShardKeys(MODEL).stats, "sh", "x", "su", "y"),
]


@pytest.mark.parametrize("command", MALFORMED)
async def test_the_size_of_an_engines_status_is_limited(
    redis_backend: OverUsers, command: Command
) -> None:
    gateway, engine = redis_backend.gateway(), redis_backend.connect("engine").client
    await engine.command("SADD", ShardKeys(MODEL).engines, "e")
    if command[1] == ShardKeys(MODEL).engines:
        await engine.command("DEL", ShardKeys(MODEL).engines)
    await engine.command(*command)
    assert await gateway.engines(MODEL) == []
    assert await gateway.drain_rate(MODEL) == 0
    assert (await gateway.depth(MODEL)).waiting == 0


async def test_its_set_of_adapters_is_read_and_reported_on_but_never_written(
    redis_backend: OverUsers,
) -> None:
    gateway = RedisAdapterSets(redis_backend.connect("gateway"))
    engine = RedisAdapterSets(redis_backend.connect("engine"))
    known = AdapterSet().added(new_adapter("sql", "/adapters/sql", "ops", 1.0))
    await gateway.replace(MODEL, AdapterSet(), known)

    assert await engine.read(MODEL) == known
    assert await engine.version(MODEL) == known.version
    with pytest.raises(BackendUnfit):
        await engine.replace(MODEL, known, AdapterSet("other"))
    report = AdapterReport({known.adapters[0].adapter_id: "1" * 32})
    await engine.report(MODEL, "e", report)
    assert await gateway.reports(MODEL, ["e", "f"]) == {"e": report}
