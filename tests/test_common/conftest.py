"""The backends of the queue, and the real Valkeys that this folder's tests share."""

from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

from headrace_common.sealing.keyring import Keyring, new_key
from headrace_common.wire import keys
from headrace_testing.backends import MODEL, Backend, InMemory, OverRedis
from headrace_testing.redis_sets import ClusterSet, SentinelSet
from headrace_testing.redis_users import OverUsers, server_with_users
from headrace_testing.valkey import ValkeyServer

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(Path(tmp_path_factory.mktemp("valkey")), appendonly=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def over_redis(valkey_server: ValkeyServer) -> AsyncIterator[OverRedis]:
    backend = OverRedis(valkey_server.url)
    await backend.wipe()
    yield backend
    await backend.close()


@pytest.fixture(scope="session")
def sentinel_set(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelSet]:
    folder = tmp_path_factory.mktemp("sentinel")
    servers = SentinelSet(folder, down_after_s=60)  # none of its tests causes a failover
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()


@pytest.fixture(scope="session")
def cluster_set(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterSet]:
    servers = ClusterSet(Path(tmp_path_factory.mktemp("cluster")))
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()


@pytest.fixture(scope="session")
def user_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = server_with_users(Path(tmp_path_factory.mktemp("users")))
    server.start()
    yield server
    server.stop()


_SERVERS = {"redis": "valkey_server", "sentinel": "sentinel_set", "cluster": "cluster_set"}


@pytest.fixture(params=["memory", *_SERVERS, "users", "users by model", "sealed"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    """The contract tests run on each; "redis*3" is one with three shards."""
    name, _, count = request.param.partition("*")
    shards = int(count or 1)
    if name == "memory":
        yield InMemory(shards)
        return
    if name == "sealed":
        url = request.getfixturevalue("valkey_server").url
        redis_backend: OverRedis = OverRedis(url, shards=shards, ring=Keyring([new_key()]))
    elif name.startswith("users"):
        engine = "engine" if name == "users" else MODEL
        redis_backend = OverUsers(request.getfixturevalue("user_server"), engine=engine)
    else:
        url = request.getfixturevalue(_SERVERS[name]).url
        redis_backend = OverRedis(url, shards=shards)
    await redis_backend.wipe()
    yield redis_backend
    await redis_backend.close()


@pytest.fixture
def in_the_last_shard(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes new requests go to the backend's last shard."""
    new = partial(keys.new_request_id, backend.shards - 1)
    monkeypatch.setattr(keys, "new_request_id", new)
