"""Web pages of other origins: allowed pages may send requests and read answers, others may not."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace_gateway.limits.api_keys import KeyFile
from headrace_gateway.settings import GatewaySettings
from headrace_testing.api_keys import KeyBook
from headrace_testing.gateway import Gateway, serve

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = "https://chat.example.com"
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


@pytest_asyncio.fixture(loop_scope="session")
async def guarded(checkpoint: Path, tmp_path: Path) -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway with keys, to which a page may send requests, and a secret."""
    book = KeyBook(tmp_path / "keys.yaml")
    secret = book.add("one")
    keys = KeyFile(book.path)
    async with serve(checkpoint, keys=keys, allowed_origins=(PAGE,)) as gateway:
        yield gateway, secret


async def test_a_browser_may_ask_for_an_allowed_page(guarded: tuple[Gateway, str]) -> None:
    gateway, secret = guarded

    allowed = await gateway.http.options(CHAT, headers={"origin": PAGE, **PREFLIGHT})
    headers = {"origin": PAGE, "authorization": f"Bearer {secret}"}
    answer = await gateway.http.post(CHAT, json=BODY, headers=headers)
    stream = await gateway.http.post(CHAT, json={**BODY, "stream": True}, headers=headers)
    refused = await gateway.http.post(CHAT, json=BODY, headers={"origin": PAGE})

    assert allowed.status_code == 200
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert [each.status_code for each in (answer, stream, refused)] == [200, 200, 401]
    for each in (allowed, answer, stream, refused):
        assert each.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_pages_of_other_origins_are_refused(guarded: tuple[Gateway, str]) -> None:
    gateway, secret = guarded
    headers = {"origin": "https://evil.example.com", "authorization": f"Bearer {secret}"}

    refused = await gateway.http.options(CHAT, headers={**headers, **PREFLIGHT})
    unread = await gateway.http.post(CHAT, json=BODY, headers=headers)

    assert refused.status_code == 400
    assert "access-control-allow-origin" not in unread.headers


async def test_other_origins_are_refused_by_default(gateway: Gateway) -> None:
    refused = await gateway.http.options(CHAT, headers={"origin": PAGE, **PREFLIGHT})

    assert refused.status_code == 405
    assert "access-control-allow-origin" not in refused.headers


async def test_origins_are_set_as_vllms_are() -> None:
    given = GatewaySettings(_cli_parse_args=["--allowed-origins", '["*"]'])

    assert given.allowed_origins == ("*",)
