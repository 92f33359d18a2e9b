"""A gateway over real sockets with a scripted engine, over one tiny trained tokenizer.

It is shared by the tests of a session, which must run on the session's event loop; each finds the
engine as new.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

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
