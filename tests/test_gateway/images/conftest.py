"""A gateway whose model reads images, for each test of a module that serves one."""

import pytest_asyncio

from headrace_testing.gateway import Gateway


@pytest_asyncio.fixture(loop_scope="session")
async def vision(serving: Gateway) -> Gateway:
    """The module's `serving`, whose engine has forgotten earlier requests."""
    serving.engine.reset()
    return serving
