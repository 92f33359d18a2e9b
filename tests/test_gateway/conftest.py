"""A gateway over real sockets with a scripted engine, over one tiny trained tokenizer.

It is shared by the tests of a session, which must run on the session's event loop; each finds the
engine in its first state.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace_gateway.models.loading import load_static
from headrace_gateway.models.models import Models
from headrace_gateway.settings import GatewaySettings
from headrace_testing.backends import MODEL, Backend, InMemory, OverRedis, empty_redis
from headrace_testing.gateway import Gateway, gateway_checkpoint, serve
from headrace_testing.valkey import ValkeyServer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gateway_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_gateway(checkpoint: Path) -> AsyncIterator[Gateway]:
    async with serve(checkpoint) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(shared_gateway: Gateway) -> Gateway:
    shared_gateway.engine.reset()
    shared_gateway.forget_engines()
    return shared_gateway


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Models:
    return Models(load_static(GatewaySettings(model=str(checkpoint), served_model_name=MODEL)))


@pytest.fixture(params=["memory", "valkey"])
async def backend(request: pytest.FixtureRequest, valkey: ValkeyServer) -> AsyncIterator[Backend]:
    """A queue of its own for each test, over both backends."""
    if request.param == "memory":
        yield InMemory()
        return
    async with empty_redis(valkey.url) as over_redis:
        yield over_redis


@pytest.fixture
async def over_redis(valkey: ValkeyServer) -> AsyncIterator[OverRedis]:
    async with empty_redis(valkey.url) as over_redis:
        yield over_redis


@pytest.fixture
def window() -> float:
    """The seconds for which a kept request runs on without a client."""
    return 60.0
