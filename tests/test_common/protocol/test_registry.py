"""The contract of the registry for engines, gateways and the operator, on both backends."""

import asyncio
import logging
import zlib
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from headrace_common.errors import BackendUnavailable, BackendUnfit
from headrace_common.protocol.model_entry import decode_entry, encode_entry
from headrace_common.protocol.registry import RegisteredModel, RegistryError, digest_of
from headrace_common.text.checkpoint import MAX_FILES_BYTES
from headrace_common.wire import keys
from headrace_testing.backends import Backend, InMemory, OverRedis
from headrace_testing.valkey import ValkeyServer

FILES = {"tokenizer.json": b"{}" * 1000, "config.json": b"\x00\xff"}
OTHERS = {"tokenizer.json": b"[]"}


def model(name: str = "org/m 1:ü", files: dict[str, bytes] | None = None) -> RegisteredModel:
    return RegisteredModel(
        name=name,
        digest=digest_of(FILES if files is None else files),
        max_model_len=4096,
        created=1_700_000_000,
        owner="ns/m",
    )


async def test_a_registered_model_is_seen_with_its_files(backend: Backend) -> None:
    assert await backend.registry().models() == {}

    await backend.registry().register(model(), FILES)

    assert await backend.registry().models() == {model().name: model()}
    assert await backend.registry().files(model()) == FILES


async def test_registering_again_changes_nothing(backend: Backend) -> None:
    registry = backend.registry()
    for _ in range(2):
        await registry.register(model(), FILES)

    assert await registry.models() == {model().name: model()}


async def test_the_last_registration_of_a_name_is_used(backend: Backend) -> None:
    registry = backend.registry()
    new = replace(model(files=OTHERS), owner="ns/other")
    await registry.register(model(), FILES)
    await registry.register(new, OTHERS)

    assert await registry.models() == {new.name: new}
    assert await registry.files(new) == OTHERS
    with pytest.raises(RegistryError, match="not those of its entry"):
        await registry.files(model())


async def test_entry_and_files_of_registrations_at_once_belong_together(backend: Backend) -> None:
    both = [(model(), FILES), (model(files=OTHERS), OTHERS)]
    await asyncio.gather(*(backend.registry().register(*each) for each in both * 8))

    registry = backend.registry()
    (left,) = (await registry.models()).values()
    assert digest_of(await registry.files(left)) == left.digest


async def test_adapters_are_listed_with_their_model(backend: Backend) -> None:
    known = replace(model(), adapters=("sql", "chat/1"))
    await backend.registry().register(known, FILES)

    assert await backend.registry().models() == {known.name: known}


def test_an_entry_of_a_version_before_adapters_has_no_adapters() -> None:
    body = msgpack.unpackb(encode_entry(model()))
    del body["adapters"]
    assert decode_entry(msgpack.packb(body)) == model()

    for wrong in ("sql", [1], {"sql": "x"}):
        with pytest.raises(RegistryError, match="adapters must be names"):
            decode_entry(msgpack.packb({**body, "adapters": wrong}))


def test_an_entry_with_too_many_adapters_is_refused() -> None:
    with pytest.raises(RegistryError, match="the names of its 9000 adapters"):
        encode_entry(replace(model(), adapters=tuple(f"adapter-{n}" for n in range(9000))))


async def test_only_the_owner_removes(backend: Backend) -> None:
    registry = backend.registry()
    await registry.register(model(), FILES)
    await registry.register(model("second"), FILES)

    assert not await registry.remove(model().name, "ns/other")
    assert not await registry.remove(model().name, "")
    assert not await registry.remove("unknown", "ns/m")
    assert await registry.remove(model().name, "ns/m")
    assert not await registry.remove(model().name, "ns/m")

    assert list(await registry.models()) == ["second"]
    with pytest.raises(RegistryError, match="gone"):
        await registry.files(model())


async def test_a_removal_differs_from_a_loss(backend: Backend) -> None:
    registry = backend.registry()
    assert (await registry.models()).store == ""
    await registry.register(model(), FILES)
    store = (await registry.models()).store
    await registry.remove(model().name, "ns/m")
    assert (await registry.models()).store == store != ""

    await backend.wipe()

    assert (await registry.models()).store == ""
    await registry.register(model(), FILES)
    assert (await registry.models()).store not in (store, "")


async def test_files_with_another_digest_are_refused(backend: Backend) -> None:
    with pytest.raises(RegistryError, match="digest"):
        await backend.registry().register(model(), OTHERS)

    assert await backend.registry().models() == {}


async def test_files_that_are_too_large_are_refused(backend: Backend) -> None:
    large = {"tokenizer.json": bytes(MAX_FILES_BYTES + 5000)}

    with pytest.raises(RegistryError, match=f"over the limit of {MAX_FILES_BYTES}"):
        await backend.registry().register(model(files=large), large)


@pytest.mark.parametrize("name", ["", "x" * 5000])
async def test_names_have_bounds(backend: Backend, name: str) -> None:
    with pytest.raises(RegistryError, match="model name"):
        await backend.registry().register(model(name), FILES)


def test_the_digest_is_of_names_and_contents() -> None:
    assert digest_of({"a": b"1", "b": b"2"}) == digest_of({"b": b"2", "a": b"1"})
    others: list[dict[str, bytes]] = [{}, {"a": b"1"}, {"a": b"2", "b": b"1"}, {"ab": b"12"}]
    digests = {digest_of(files) for files in ({"a": b"1", "b": b"2"}, *others)}
    assert len(digests) == 1 + len(others)


def test_an_entry_keeps_its_creation_time_if_files_and_owner_are_the_same() -> None:
    old, new = model(), replace(model(), created=1_800_000_000)

    assert new.since(old) == old
    assert new.since(None) == new
    assert new.since(replace(old, owner="")) == new
    assert new.since(model(files=OTHERS)) == new
    assert replace(new, max_model_len=8).since(old) == replace(old, max_model_len=8)


async def test_an_outage_is_reported(memory: InMemory) -> None:
    registry = memory.registry()
    memory.store.available = False
    with pytest.raises(BackendUnavailable):
        await registry.models()
    with pytest.raises(BackendUnavailable):
        await registry.register(model(), FILES)


@pytest.fixture
def memory() -> InMemory:
    return InMemory()


# Only over Redis


BROKEN = [
    b"",
    b"\xc1",
    b"\x80",
    msgpack.packb([1]),
    msgpack.packb({"name": "x", "digest": 1, "max_model_len": 1, "created": 1, "owner": ""}),
    msgpack.packb({"name": "x", "digest": "", "max_model_len": True, "created": 1, "owner": ""}),
    msgpack.packb({"name": "x", "digest": "", "max_model_len": 0, "created": 1, "owner": ""}),
    encode_entry(model("another")),
    b"x" * 10_000,
]


@pytest.mark.parametrize("data", BROKEN)
async def test_an_unreadable_entry_does_not_affect_other_entries(
    over_redis: OverRedis, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    registry = over_redis.registry()
    await registry.register(model(), FILES)
    await over_redis.client.command("HSET", keys.MODELS, "x", data)

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert await registry.models() == {model().name: model()}

    assert len(caplog.records) == 1
    assert not await registry.remove("x", "")


def test_unknown_fields_of_an_entry_are_ignored() -> None:
    fields = msgpack.unpackb(encode_entry(model()))

    assert decode_entry(msgpack.packb({**fields, "new": 1})) == model()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not compressed", "damaged"),
        (zlib.compress(msgpack.packb(FILES))[:-5], "cut short"),
        (zlib.compress(bytes(MAX_FILES_BYTES + 10_000), level=1), "over"),
        (zlib.compress(b"\xc1"), "not msgpack"),
        (zlib.compress(msgpack.packb([1])), "map"),
        (zlib.compress(msgpack.packb({"a": 1})), "not bytes"),
        (zlib.compress(msgpack.packb({"tokenizer.json": b""})), "not those of its entry"),
    ],
)
async def test_damaged_files_are_reported(over_redis: OverRedis, data: bytes, message: str) -> None:
    registry = over_redis.registry()
    await registry.register(model(), FILES)
    await over_redis.client.command("SET", keys.model_files(model().name), data)

    with pytest.raises(RegistryError, match=message):
        await registry.files(model())


async def test_removing_leaves_no_key_but_the_stores_name(over_redis: OverRedis) -> None:
    registry = over_redis.registry()
    await registry.register(model(), FILES)
    await registry.remove(model().name, "ns/m")

    assert await over_redis.client.command("KEYS", "*") == [keys.MODELS.encode()]
    assert await over_redis.client.command("HKEYS", keys.MODELS) == [keys.MODELS_STORE]


async def test_files_are_compressed_at_rest(over_redis: OverRedis) -> None:
    await over_redis.registry().register(model(), FILES)

    size = await over_redis.client.command("STRLEN", keys.model_files(model().name))
    assert size < sum(map(len, FILES.values())) / 4


async def test_a_full_server_refuses_new_models_but_allows_removals(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path)
    server.start()
    redis_backend = OverRedis(server.url)
    try:
        registry = redis_backend.registry()
        await registry.register(model(), FILES)
        await redis_backend.client.command("CONFIG SET", "maxmemory", "1")
        with pytest.raises(BackendUnavailable):
            await registry.register(model("second"), FILES)
        assert await registry.remove(model().name, "ns/m")
    finally:
        await redis_backend.close()
        server.stop()


async def test_a_user_without_the_keys_is_reported(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path)
    server.start()
    redis_backend = OverRedis(server.url)
    narrow = "~q:* ~r:*"
    rights = ("on", ">p", "+@read", "+@write", "+@scripting", "+@connection", "+info")
    try:
        await redis_backend.client.command("ACL", "SETUSER", "u", *rights, *narrow.split())
        poor = OverRedis(server.url.replace("://", "://u:p@"))
        with pytest.raises(BackendUnfit, match="permission"):
            await poor.registry().models()
        await poor.close()
    finally:
        await redis_backend.close()
        server.stop()
