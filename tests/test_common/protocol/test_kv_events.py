"""KV events in Redis: complete for every reader, bounded, and checked before use."""

import zlib
from collections.abc import AsyncIterator

import msgpack
import pytest

from headrace_common.errors import MessageError
from headrace_common.protocol.kv_events import (
    MAX_CHANGES,
    MAX_EVENT_BYTES,
    BlockFilter,
    FollowedFilter,
    KVEvent,
    decode_event,
    encode_event,
)
from headrace_common.protocol.redis.kv_events import RedisKVEventReader, RedisKVEventWriter
from headrace_common.sealing.keyring import Keyring, new_key
from headrace_common.wire.block_hashes import MAX_BITS, MIN_BITS, block_position, filter_bits
from headrace_common.wire.keys import ShardKeys
from headrace_testing.backends import MODEL, OverRedis
from headrace_testing.redis_users import OverUsers
from headrace_testing.valkey import ValkeyServer

SIZE = 2**MIN_BITS // 8


def whole(number: int, *bits: int) -> KVEvent:
    full = BlockFilter(MIN_BITS, 16)
    full.change(bits, ())
    return KVEvent(number=number, block_size=16, bits=MIN_BITS, whole=full.whole)


def change(number: int, added: tuple[int, ...], removed: tuple[int, ...] = ()) -> KVEvent:
    return KVEvent(number=number, block_size=16, bits=MIN_BITS, added=added, removed=removed)


def bits_of(followed: FollowedFilter) -> list[int]:
    assert followed.filter is not None
    bits = int.from_bytes(followed.filter.whole, "little")
    return [position for position in range(8 * SIZE) if bits >> position & 1]


@pytest.fixture(params=["users", "users by model", "sealed"])
async def redis_backend(
    request: pytest.FixtureRequest, valkey_server: ValkeyServer, user_server: ValkeyServer
) -> AsyncIterator[OverRedis]:
    made: OverRedis
    if request.param == "sealed":
        made = OverRedis(valkey_server.url, ring=Keyring([new_key()]))
    else:
        made = OverUsers(user_server, engine=MODEL if "model" in request.param else "engine")
    await made.wipe()
    yield made
    await made.close()


async def read(reader: RedisKVEventReader, engines: dict[str, FollowedFilter]) -> None:
    after = {engine: followed.last_id for engine, followed in engines.items()}
    for engine, events in (await reader.read(MODEL, after)).items():
        for event_id, data in events:
            engines[engine].follow(event_id, decode_event(data))


async def test_readers_know_each_engines_blocks(redis_backend: OverRedis) -> None:
    writers = {
        name: RedisKVEventWriter(redis_backend.connect("engine"), name, MODEL) for name in "ab"
    }
    reader = RedisKVEventReader(redis_backend.connect("gateway"))
    early = {name: FollowedFilter() for name in "ab"}
    assert not await writers["a"].write(change(1, (1,))), "nothing precedes it"
    assert await writers["a"].write(whole(2, 1, 2))
    await read(reader, early)
    assert (bits_of(early["a"]), early["b"].filter) == ([1, 2], None)
    assert await writers["a"].write(change(3, (3,), (1,)))
    assert await writers["b"].write(whole(1, 9))
    late = {name: FollowedFilter() for name in "ab"}
    for engines in (early, late):
        await read(reader, engines)
        assert [bits_of(engines[name]) for name in "ab"] == [[2, 3], [9]]
    assert await writers["a"].write(change(4, (4,)))
    assert await writers["a"].write(whole(5, 5))
    for engines in (early, late):
        await read(reader, engines)
        assert bits_of(engines["a"]) == [5]
    assert await writers["a"].renew()


async def test_events_live_for_a_minute_after_they_were_renewed(over_redis: OverRedis) -> None:
    writer, name = RedisKVEventWriter(over_redis.connection, "a", MODEL), over_redis.keys
    assert not await writer.renew()
    await writer.write(whole(1))
    for number in range(2, 9):
        await writer.write(change(number, (number,)))
    assert await over_redis.client.command("XLEN", name.kv_events("a")) == 8
    assert 0 < await over_redis.client.command("PTTL", name.kv_events("a")) <= 60_000
    await writer.write(whole(9))
    assert await over_redis.client.command("XLEN", name.kv_events("a")) == 1


async def test_what_is_no_event_is_left_out(over_redis: OverRedis) -> None:
    name = ShardKeys(MODEL)
    await over_redis.client.command("SET", name.kv_events("a"), "text")
    await over_redis.client.command("XADD", name.kv_events("b"), "*", "other", "text")
    await RedisKVEventWriter(over_redis.connection, "c", MODEL).write(whole(1, 7))
    reader = RedisKVEventReader(over_redis.connection)
    found = await reader.read(MODEL, dict.fromkeys("abc", ""))
    assert sorted(found) == ["b", "c"] and [data for _, data in found["b"]] == [b""]
    sealed = OverRedis(over_redis.config.url, ring=Keyring([new_key()]))
    found = await RedisKVEventReader(sealed.connection).read(MODEL, dict.fromkeys("abc", ""))
    assert found == {"b": [], "c": []}, "a reader with keys reads nothing that is not sealed"
    await sealed.close()


def test_a_gap_makes_a_filter_unknown_until_the_next_whole_one() -> None:
    followed = FollowedFilter()
    followed.follow("1-0", change(1, (1,)))
    assert followed.filter is None
    followed.follow("2-0", whole(2, 1))
    followed.follow("3-0", change(4, (2,)))
    assert (followed.filter, followed.last_id) == (None, "3-0")
    followed.follow("4-0", change(5, (3,)))
    assert followed.filter is None
    followed.follow("5-0", whole(6, 8))
    assert bits_of(followed) == [8]
    followed.follow("6-0", KVEvent(number=7, block_size=16, bits=MAX_BITS, added=(2**19,)))
    assert followed.filter is None, "of another size"


def test_an_event_is_read_as_it_was_written() -> None:
    for event in (whole(1, 0, 8 * SIZE - 1), change(2, (1, 2), (3,))):
        decoded = decode_event(encode_event(event))
        assert decoded == event and tuple(decoded.added) == tuple(event.added)


PACKED = (5).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([1, 1, 16, MIN_BITS - 1, b"", b"", b""], "a filter of 9 bits"),
        ([1, 1, 16, MAX_BITS + 1, b"", b"", b""], "from 0 to 20"),
        ([1, 1, 0, MIN_BITS, b"", b"", b""], "blocks of 0 tokens"),
        ([1, 1, 16, MIN_BITS, b"text", b"", b""], "not zlib"),
        ([1, 1, 16, MIN_BITS, "x", b"", b""], "must be bytes"),
        ([1, 1, 16, MIN_BITS, zlib.compress(bytes(SIZE - 1)), b"", b""], "has not 128 bytes"),
        ([1, 1, 16, MIN_BITS, zlib.compress(bytes(10**6)), b"", b""], "has not 128 bytes"),
        ([1, 1, 16, MIN_BITS, b"", PACKED * (MAX_CHANGES + 1), b""], "at most 4096"),
        ([1, 1, 16, MIN_BITS, b"", b"", (2**MIN_BITS).to_bytes(4, "little")], "outside"),
        ([1, 1, 16, MIN_BITS, b"", b"123", b""], "multiple of 4"),
        ([1, 1, 16, MIN_BITS, b"", b""], "elements"),
        ([2, 1, 16, MIN_BITS, b"", b"", b""], "version"),
    ],
)
def test_a_malformed_event_is_refused(body: list[object], message: str) -> None:
    with pytest.raises(MessageError, match=message):
        decode_event(msgpack.packb(body))


def test_an_event_that_is_too_large_is_refused() -> None:
    with pytest.raises(MessageError, match="over"):
        decode_event(bytes(MAX_EVENT_BYTES + 1))


def test_a_filter_grows_with_the_cache_up_to_a_bound() -> None:
    sizes = {1: MIN_BITS, 8: 10, 9: 11, 4096: 19, 8192: 20, 10**6: MAX_BITS}
    assert {blocks: filter_bits(blocks) for blocks in sizes} == sizes
    assert block_position(b"\xff" * 32, MAX_BITS) == 2**MAX_BITS - 1
    assert block_position(b"\0\1" + bytes(30), 16) == 1
