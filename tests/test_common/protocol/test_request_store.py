"""Stored requests: on both backends, and their encoding."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import msgpack
import pytest

from headrace_common.errors import MessageError
from headrace_common.protocol.store import StoredRequest, decode_stored, encode_stored
from headrace_testing.backends import Backend, make_request

ID = "0" * 32


def stored(body: bytes = b"one", *, seconds: float = 600.0) -> StoredRequest:
    return StoredRequest(
        request_id=ID,
        operation="chat",
        fingerprint=body,
        created=1,
        expires_ms=int((time.time() + seconds) * 1000),
        requests=(make_request(n=2), make_request()),
        stop=("a", "é"),
        include_usage=True,
        background=True,
    )


async def test_the_first_stored_request_is_kept(backend: Backend) -> None:
    store, other = backend.request_store(), backend.request_store()
    one, two = stored(), stored(b"two")
    assert await store.get(ID) is None
    assert await store.put(one) == one
    assert await other.put(two) == one
    assert await other.put(one) == one
    assert await other.get(ID) == one


async def test_one_of_many_concurrent_stores_succeeds(backend: Backend) -> None:
    stores = [backend.request_store() for _ in range(8)]
    kept = await asyncio.gather(*(store.put(stored()) for store in stores))
    assert len({each.name for each in kept}) == 1


async def test_only_the_request_that_was_read_is_replaced(backend: Backend) -> None:
    store = backend.request_store()
    one, two, three = stored(), stored(), stored()
    await store.put(one)
    assert await store.put(two, replaces=one) == two
    assert await store.put(three, replaces=one) == two


async def test_only_the_identical_request_is_removed(backend: Backend) -> None:
    store = backend.request_store()
    one = stored()
    await store.put(one)
    await store.remove(stored())
    assert await store.get(ID) == one
    await store.remove(one)
    assert await store.get(ID) is None


async def test_an_expired_request_is_gone(backend: Backend) -> None:
    store = backend.request_store()
    await store.put(stored(seconds=-1))
    assert await store.get(ID) is None


async def test_presence_lasts_for_the_time_that_it_names(backend: Backend) -> None:
    store = backend.request_store()
    assert await store.presence_left(ID) == 0
    await store.set_presence(ID, 60)
    assert 50 < await store.presence_left(ID) <= 60


async def test_all_gateways_share_a_salt(backend: Backend) -> None:
    store = backend.request_store()
    salts = {await each.salt() for each in (store, backend.request_store(), store)}
    assert len(salts) == 1 and len(salts.pop()) == 32


def test_a_generation_has_its_own_name() -> None:
    one = stored()
    other = replace(one, generation="x")
    assert decode_stored(encode_stored(other)) == other and other.name != one.name


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: {**body, "v": 2},
        lambda body: {**body, "requests": []},
        lambda body: {**body, "requests": [b"x"]},
        lambda body: {**body, "stop": [1]},
        lambda body: {**body, "expires": "x"},
        lambda body: {**body, "background": 1},
        lambda body: [body],
    ],
)
def test_data_other_than_a_stored_request_is_refused(spoil: Callable[[object], object]) -> None:
    body = msgpack.unpackb(encode_stored(stored()))
    with pytest.raises(MessageError):
        decode_stored(msgpack.packb(spoil(body)))


def test_unknown_fields_are_ignored() -> None:
    one = stored()
    body = msgpack.unpackb(encode_stored(one))
    assert decode_stored(msgpack.packb({**body, "new": 1})) == one


def test_a_request_that_is_too_large_is_refused() -> None:
    request = replace(make_request(), prompt_token_ids=tuple(range(2**20)))
    with pytest.raises(MessageError):
        encode_stored(replace(stored(), requests=(request,) * 5))
