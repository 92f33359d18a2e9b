"""Both backends of the queue, and the one real Valkey that this folder's tests share."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from headrace_testing.backends import Backend, InMemory, OverRedis
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


@pytest.fixture(params=["memory", "redis"])
async def backend(
    request: pytest.FixtureRequest,
) -> AsyncIterator[Backend]:
    """The contract tests run on each."""
    if request.param == "memory":
        yield InMemory()
        return
    server: ValkeyServer = request.getfixturevalue("valkey_server")
    over = OverRedis(server.url)
    await over.wipe()
    yield over
    await over.close()
