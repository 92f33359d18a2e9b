from collections.abc import AsyncIterator

import pytest

from headrace_testing.kubernetes import User, api_server
from headrace_testing.operators import Scene


@pytest.fixture
async def user() -> AsyncIterator[User]:
    async with api_server() as found:
        yield found


@pytest.fixture
def scene() -> Scene:
    return Scene()
