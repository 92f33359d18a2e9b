"""The queue on a cluster: one slot for each script, followed redirections, a replaced master."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot
from redis.exceptions import MovedError

from headrace_common.errors import BackendUnavailable, BackendUnfit
from headrace_common.protocol.accounts import Item, ItemKind, Quota
from headrace_common.protocol.adapters import AdapterSet
from headrace_common.protocol.base import EngineQueue, Outcome, Progress, QueueLimits, TenantUse
from headrace_common.protocol.kv_events import KVEvent
from headrace_common.protocol.limits import Rates, Settlement
from headrace_common.protocol.redis.adapters import RedisAdapterSets
from headrace_common.protocol.redis.admin import DeadLetter, QueueAdmin
from headrace_common.protocol.redis.client.connection import (
    Connection,
    ConnectionConfig,
    check_backend,
)
from headrace_common.protocol.redis.client.slots import SlotMap, slot_of
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.protocol.redis.kv_events import RedisKVEventReader, RedisKVEventWriter
from headrace_common.protocol.redis.limits import RedisKeyUsage
from headrace_common.protocol.redis.loads import RedisModelLoads
from headrace_common.protocol.redis.scripts import NAMES, Scripts
from headrace_common.protocol.redis.slots import RedisSlot
from headrace_common.protocol.registry import RegisteredModel, RegistrationGrant, digest_of
from headrace_common.protocol.slots import SlotAction
from headrace_common.protocol.store import StoredRequest
from headrace_common.wire import keys
from headrace_common.wire.block_hashes import MIN_BITS
from headrace_common.wire.images import ImageData, ImageSpan
from headrace_common.wire.messages import Cancel, ChoiceState, Tokens
from headrace_testing.backends import MODEL, OverRedis, make_request, make_status
from headrace_testing.redis_sets import ClusterSet, ask
from headrace_testing.valkey import ValkeyServer
from headrace_testing.waiting import eventually, first

LIMITS = QueueLimits()
LOADED_SCRIPTS = frozenset(NAMES)


@pytest.fixture
async def redis_backend(cluster_set: ClusterSet) -> AsyncIterator[OverRedis]:
    redis_backend = OverRedis(cluster_set.url)
    await redis_backend.wipe()
    yield redis_backend
    await redis_backend.close()


@pytest.fixture
async def own_set(tmp_path: Path) -> AsyncIterator[ClusterSet]:
    """A cluster for this test alone, since a failover changes it."""
    servers = ClusterSet(tmp_path)
    try:
        await asyncio.to_thread(servers.start)
        yield servers
    finally:
        servers.stop()


def tokens(request_id: str, *token_ids: int) -> Tokens:
    return Tokens(request_id=request_id, attempt=1, choice=0, index=0, token_ids=token_ids)


def gateway_at(servers: ClusterSet, node: int) -> str:
    """The id of a gateway whose frames are on this master."""
    bounds = [0, 5461, 10923, 16384]
    return next(
        name
        for name in (f"g{number}" for number in range(1000))
        if bounds[node] <= key_slot(keys.frames(name, MODEL).encode()) < bounds[node + 1]
    )


async def use_everything(redis_backend: OverRedis) -> None:
    """Runs every script, by the calls of gateways, engines and the operator."""
    gateway, engine = redis_backend.gateway(), redis_backend.engine(lease_ms=1)
    await gateway.start()
    await engine.start()
    picture = ImageSpan(
        digest=b"d" * 32, start=0, length=1, grid=(1, 2, 2), data=ImageData(b"picture", b"c")
    )
    request, other = replace(make_request(), images=(picture,)), make_request()
    for item in (request, other):
        await gateway.admit(item, LIMITS)
    assert (await gateway.queue_positions([other.request_id], MODEL)) != [None]
    await replay(QueueAdmin(redis_backend.connection), other.request_id)
    (lease, _) = await engine.take(2)
    rid = lease.request.request_id
    await engine.resume(rid, 1, (ChoiceState(token_ids=(1,)),))
    await engine.beat(
        [
            Progress(
                request_id=rid, attempt=1, journaled=(1,), choices=(ChoiceState(token_ids=(2,)),)
            )
        ],
        make_status(),
    )
    await engine.give_back([other.request_id])
    await engine.reap(1)
    await gateway.send("e", MODEL, Cancel(request_id=rid))
    await gateway.cancel(other.request_id, MODEL)
    await engine.finish(rid, 1, Outcome())
    await gateway.deliver_outcome(rid, MODEL)
    await gateway.depth(MODEL)
    await gateway.engines(MODEL)
    await gateway.drain_rate(MODEL)
    await gateway.release(rid, MODEL, "e", 1)
    await gateway.note_given(rid, MODEL, 1)
    await gateway.drop_images(request)
    shard = RedisEngineQueue(redis_backend.connect(), "e", MODEL)
    await shard.tenant_use(0.0)
    await shard.add_tenant_use({1: TenantUse("epoch", {"tenant": 1})})
    slot = RedisSlot(redis_backend.connect(), "group", "e", MODEL)
    await slot.act(SlotAction.TAKE, await slot.demand())
    event = KVEvent(number=1, block_size=16, bits=MIN_BITS, whole=bytes(2**MIN_BITS // 8))
    await RedisKVEventWriter(redis_backend.connect(), "e", MODEL).write(event)
    reader = RedisKVEventReader(redis_backend.connect())
    assert len((await reader.read(MODEL, {"e": "", "other": ""}))["e"]) == 1
    await use_stores(redis_backend)


async def replay(admin: QueueAdmin, request_id: str) -> None:
    """Replays a request; it is refused, since nothing is wrong with the request, but the script
    runs."""
    await admin.status(MODEL)
    await admin.peek(MODEL, limit=9)
    letter = DeadLetter(
        letter_id="1-1",
        request_id=request_id,
        why="poisoned",
        failures=4,
        at=0.0,
        shard=0,
        replayable=True,
    )
    assert not await admin.replay(MODEL, letter, seconds=60)


async def use_stores(redis_backend: OverRedis) -> None:
    registry, store = redis_backend.registry(), redis_backend.request_store()
    files = {"config.json": b"{}"}
    known = RegisteredModel(
        name="m", digest=digest_of(files), max_model_len=8, created=1, owner="ns/m"
    )
    await registry.register(known, files)
    await registry.grant("m", RegistrationGrant(owner="ns/m"))
    await registry.models()
    await registry.remove("m", "ns/m")
    loads = RedisModelLoads(redis_backend.connect(), "g")
    assert await loads.begin(known.digest) is None
    await loads.end(known.digest)
    adapters = RedisAdapterSets(redis_backend.connect())
    assert await adapters.replace("m", AdapterSet(), AdapterSet("first"))
    stored = make_stored()
    await store.salt()
    await store.put(stored)
    await store.set_presence(stored.request_id, 60)
    assert await store.presence_left(stored.request_id) > 0
    await store.remove(stored)
    accounts, item = redis_backend.accounts(), Item(ItemKind.REQUEST, "one", 9, stored.expires_ms)
    assert await accounts.occupy("t", item, Quota(max_bytes=9)) is None
    assert (await accounts.used("t"))[ItemKind.REQUEST] == 9
    await accounts.vacate("t", [(ItemKind.REQUEST, "one")])
    usage = RedisKeyUsage(redis_backend.connect())
    await usage.reserve("k", "r", Rates(requests=3), 1)
    await usage.renew("k", ["r"])
    await usage.settle("k", "r", Rates(requests=3), Settlement(reserved=1, used=1, duration_ms=1))


def make_stored() -> StoredRequest:
    return StoredRequest(
        request_id="0" * 32,
        operation="chat",
        fingerprint=b"f",
        created=1,
        expires_ms=int((time.time() + 60) * 1000),
        requests=(make_request(),),
        stop=(),
        include_usage=False,
        background=False,
    )


async def test_each_script_has_keys_of_one_slot(
    over_redis: OverRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single server accepts keys of several slots, so only this test detects them."""
    ran: dict[str, set[int]] = {}
    run, run_many = Scripts.run, Scripts.run_many

    def note(name: str, names: Sequence[str]) -> None:
        slots = {key_slot(key.encode()) for key in names}
        assert len(slots) == 1, f"{name} has keys of several slots: {names}"
        ran.setdefault(name, set()).update(slots)

    async def noted_run(self: Scripts, name: str, names: Sequence[str], args: Any) -> Any:
        note(name, names)
        return await run(self, name, names, args)

    async def noted_run_many(self: Scripts, name: str, calls: Any) -> list[Any]:
        for names, _ in calls:
            note(name, names)
        return await run_many(self, name, calls)

    monkeypatch.setattr(Scripts, "run", noted_run)
    monkeypatch.setattr(Scripts, "run_many", noted_run_many)
    await use_everything(over_redis)
    assert ran.keys() == LOADED_SCRIPTS


async def test_everything_runs_on_a_cluster(redis_backend: OverRedis) -> None:
    """The servers refuse commands and scripts with keys of several slots."""
    await use_everything(redis_backend)


async def test_frames_for_gateways_on_all_nodes_arrive(
    redis_backend: OverRedis, cluster_set: ClusterSet
) -> None:
    names = [gateway_at(cluster_set, node) for node in range(3)]
    await redis_backend.engine().publish(
        {name: [tokens("0.r", number)] for number, name in enumerate(names)}
    )
    for number, name in enumerate(names):
        (frame,) = await first(redis_backend.gateway(name).frames(), 1)
        assert frame.replies == (tokens("0.r", number),)


async def test_a_lost_master_is_replaced_by_its_replica(own_set: ClusterSet) -> None:
    """Frames with blocked reads and a queue continue on the other masters, and back again."""
    redis_backend = OverRedis(own_set.url)
    name = gateway_at(own_set, 0)
    gateway, engine = redis_backend.gateway(name), redis_backend.engine()
    await gateway.start()
    await engine.start()
    frames = gateway.frames()
    await engine.publish({name: [tokens("0.r", 1)]})
    await anext(frames)
    blocked = asyncio.ensure_future(anext(frames))
    await asyncio.wait({blocked}, timeout=0.05)
    for node in own_set.nodes[:1]:
        await asyncio.to_thread(ask, node.port, "WAIT", 1, 0)
    own_set.masters[0].kill()
    with pytest.raises(BackendUnavailable):
        await engine.publish({name: [tokens("0.r", 1, 2)]})
    await asyncio.to_thread(own_set.until_promoted)
    await done(lambda: engine.publish({name: [tokens("0.r", 1, 2)]}))
    assert (await asyncio.wait_for(blocked, 30)).replies == (tokens("0.r", 1),)
    assert (await anext(frames)).replies == (tokens("0.r", 1, 2),)
    own_set.masters[0].start()
    await asyncio.to_thread(own_set.until_healed)
    await gateway.beat()
    await frames.aclose()  # type: ignore[attr-defined]
    await redis_backend.close()


async def test_a_process_started_while_a_node_is_away_serves_the_other_shards(
    cluster_set: ClusterSet,
) -> None:
    """It also serves the node's shards once the node is back without any data or scripts."""
    slots = [key_slot(keys.ShardKeys(MODEL, shard).stats.encode()) for shard in range(3)]
    owners = [cluster_set.owner(slot) for slot in slots]
    # One that has neither the first shard nor a replica.
    gone = next(shard for shard in (1, 2) if owners[shard] is not cluster_set.masters[0])
    nodes = ",".join(f"127.0.0.1:{node.port}" for node in cluster_set.masters)
    redis_backend = OverRedis(f"redis+cluster://{nodes}", shards=3)
    await redis_backend.wipe()
    name = gateway_at(cluster_set, cluster_set.masters.index(owners[0]))
    gateway, engine = redis_backend.gateway(name), redis_backend.engine()
    there = [shard for shard in range(3) if shard != gone]
    owners[gone].kill()
    try:
        await gateway.start()
        await engine.start()
        for shard in there:
            await gateway.admit(make_request(request_id=keys.new_request_id(shard)), LIMITS)
        assert sorted(await taken(engine)) == there
        await engine.beat([], make_status())
    finally:
        await asyncio.to_thread(owners[gone].start)
        await asyncio.to_thread(cluster_set.until_whole)
    late = make_request(request_id=keys.new_request_id(gone))
    await done(lambda: gateway.admit(late, LIMITS))
    found: list[int] = []

    async def served() -> bool:
        found.extend(await taken(engine))
        return bool(found)

    await eventually(served)
    assert found == [gone]
    await redis_backend.close()


async def taken(engine: EngineQueue) -> list[int]:
    return [keys.shard_of(lease.request.request_id) for lease in await engine.take(9)]


async def done(action: Callable[[], Awaitable[object]]) -> None:
    """Repeats an action while Redis is unreachable, as gateways and engines do."""

    async def once() -> bool:
        try:
            await action()
        except BackendUnavailable:
            return False
        return True

    await eventually(once)


async def test_a_slot_that_moves_is_followed(
    redis_backend: OverRedis, cluster_set: ClusterSet
) -> None:
    """ASK while it moves, MOVED after that, by commands and by a read that is blocked."""
    name = gateway_at(cluster_set, 2)
    slot = key_slot(keys.frames(name, MODEL).encode())
    here, there = cluster_set.owner(slot), cluster_set.masters[1]
    engine, frames = redis_backend.engine(), redis_backend.gateway(name).frames()
    await engine.publish({name: [tokens("0.r", 1)]})
    await anext(frames)
    blocked = asyncio.ensure_future(anext(frames))
    await asyncio.wait({blocked}, timeout=0.05)
    reader, read = (
        redis_backend.connection.reader(),
        ("XREAD", "STREAMS", keys.frames(name, MODEL), "0-0"),
    )
    assert len((await reader.command(*read))[0][1]) == 1
    ids = {node: ask(node.port, "CLUSTER", "MYID") for node in (here, there)}
    ask(there.port, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[here])
    ask(here.port, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[there])
    ask(here.port, "MIGRATE", "127.0.0.1", there.port, keys.frames(name, MODEL), 0, 5000)
    await engine.publish({name: [tokens("0.r", 1, 2)]})
    assert ask(there.port, "CLUSTER", "COUNTKEYSINSLOT", slot) == 1
    assert await redis_backend.client.command("XLEN", keys.frames(name, MODEL)) == 2
    later = redis_backend.gateway(name).frames()
    assert (await anext(later)).replies == (tokens("0.r", 1),)
    assert (await anext(later)).replies == (tokens("0.r", 1, 2),)
    for node in (there, here, *cluster_set.masters):
        ask(node.port, "CLUSTER", "SETSLOT", slot, "NODE", ids[there])
    await engine.publish({name: [tokens("0.r", 1, 2, 3)]})
    assert await redis_backend.client.command("XLEN", keys.frames(name, MODEL)) == 3
    with pytest.raises(MovedError):
        await reader.command(*read)
    await reader.close()
    newest = (tokens("0.r", 1, 2, 3),)
    assert (await anext(later)).replies == newest
    async with asyncio.timeout(30):
        found = await blocked
        while found.replies != newest:
            found = await anext(frames)
    for stream in (frames, later):
        await stream.aclose()  # type: ignore[attr-defined]


async def test_every_master_is_checked(redis_backend: OverRedis, cluster_set: ClusterSet) -> None:
    port = cluster_set.masters[2].port
    ask(port, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(BackendUnfit, match="set maxmemory-policy noeviction"):
            await check_backend(redis_backend.connection)
    finally:
        ask(port, "CONFIG", "SET", "maxmemory-policy", "noeviction")
    await check_backend(redis_backend.connection)


async def test_scripts_come_back_after_every_master_forgot_them(redis_backend: OverRedis) -> None:
    await use_everything(redis_backend)
    await redis_backend.client.each("SCRIPT FLUSH")
    await redis_backend.wipe()
    await use_everything(redis_backend)


@pytest.mark.parametrize(
    ("cluster", "remedy"),
    [(True, r"use a URL like redis\+cluster://"), (False, "use the scheme redis")],
)
async def test_a_url_of_the_wrong_kind_is_refused(
    cluster_set: ClusterSet, valkey_server: ValkeyServer, cluster: bool, remedy: str
) -> None:
    url = f"redis://127.0.0.1:{cluster_set.masters[0].port}"
    if not cluster:
        url = f"redis+cluster://127.0.0.1:{valkey_server.port}"
    connection = Connection(ConnectionConfig(url=url))
    with pytest.raises(BackendUnfit, match=remedy):
        await check_backend(connection)
    await connection.close()


async def test_an_unreachable_cluster_is_unavailable() -> None:
    connection = Connection(ConnectionConfig(url="redis+cluster://127.0.0.1:1,127.0.0.1:2"))
    with pytest.raises(BackendUnavailable, match="no node of the cluster"):
        await check_backend(connection)
    await connection.close()


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("GET", "a"), "a"),
        (("XINFO GROUPS", b"{b}c"), "b"),
        (("EVALSHA", "sha", 2, "{c}1", "{c}2", "x"), "c"),
        (("XREAD", "BLOCK", 10, "STREAMS", "{d}1", "{d}2", "0-0", "0-0"), "d"),
    ],
)
def test_the_slot_of_a_command(command: tuple[str | bytes | int, ...], key: str) -> None:
    assert slot_of(command) == key_slot(key.encode())


@pytest.mark.parametrize("command", [("TIME",), ("SCRIPT LOAD", "x"), ("EVAL", "return 1", 0)])
def test_commands_without_a_key_have_no_slot(command: tuple[str | int, ...]) -> None:
    assert slot_of(command) is None


def test_unassigned_slots_are_recognised() -> None:
    slots = SlotMap()
    slots.load([[10, 20, [b"", 1]], [30, 40, [b"h", 2], [b"replica", 3]]], ("asked", 9))
    assert [slots.master(slot) for slot in (9, 10, 20, 21, 30, 41)] == [
        *(None, ("asked", 1), ("asked", 1), None, ("h", 2), None)
    ]
    slots.move(21, ("h", 4))
    assert slots.master(21) == ("h", 4)
    assert slots.masters == (("asked", 1), ("h", 2), ("h", 4))
