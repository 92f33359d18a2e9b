"""Images that are fetched: only from allowed hosts, at public addresses, within bounds."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from headrace_gateway.errors import ApiError
from headrace_gateway.images.addresses import is_public
from headrace_gateway.images.fetching import MOST_AT_ONCE, Fetcher, addresses_of
from headrace_testing.images import picture

PICTURE = picture()
MAX_BYTES = 10_000
HOST = "images.example.com"

Serve = Callable[[str], bytes]


def answer(
    body: bytes = PICTURE, *, status: str = "200 OK", kind: str = "image/png", more: str = ""
) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[tuple[int, list[str]]]:
    """A server of bytes by path; yields its port and the requests that it was sent."""
    asked: list[str] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        asked.append(head)
        writer.write(serve(head.split()[1]))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], asked


def fetcher(port: int, *addresses: str, domains: Sequence[str] = ()) -> Fetcher:
    """Resolves every name to these addresses, by default to that of the test's server."""

    async def resolve(_host: str, _port: int) -> Sequence[str]:
        return addresses or ("127.0.0.1",)

    return Fetcher(
        domains or (f"{HOST}:{port}",),
        MAX_BYTES,
        resolve=resolve,
        permits=lambda address: address == "127.0.0.1" or is_public(address),
    )


async def refusal(fetching: Fetcher, url: str) -> str:
    with pytest.raises(ApiError) as refused:
        await fetching.fetch(url, "field", "a")
    assert (refused.value.status, refused.value.param) == (400, "field")
    assert refused.value.code == "invalid_image"
    return refused.value.message


async def test_an_image_is_fetched_from_an_allowed_host() -> None:
    async with serving(lambda _: answer()) as (port, asked):
        found = await fetcher(port).fetch(
            f"http://{HOST}:{port}/a%20cat.png?size=1#x", "field", "a"
        )

    assert found == PICTURE
    (head,) = asked
    assert head.startswith("GET /a%20cat.png?size=1 HTTP/1.1\r\n")
    assert f"Host: {HOST}:{port}\r\n" in head


async def test_without_allowed_hosts_nothing_is_fetched() -> None:
    assert "fetches no images" in await refusal(Fetcher((), MAX_BYTES), f"http://{HOST}/x")


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example.com/x.png",
        f"http://{HOST}:81/x.png",
        f"http://user@{HOST}/x.png",
        f"http://{HOST}@127.0.0.1/x.png",
        f"http://{HOST}%00.evil.example/x.png",
        f"ftp://{HOST}/x.png",
        "file:///etc/passwd",
        "http://[::1/x.png",
        f"http://{HOST}:port/x.png",
        "x.png",
        "",
    ],
)
async def test_only_named_hosts_are_asked(url: str) -> None:
    await refusal(fetcher(1, domains=[HOST]), url)


@pytest.mark.parametrize("path", ["/a b", "/a\r\nX: y", "/\u00e4", "/\x7f"])
async def test_a_url_cannot_change_the_request(path: str) -> None:
    async with serving(lambda _: answer()) as (port, asked):
        fetching = fetcher(port)
        try:
            await fetching.fetch(f"http://{HOST}:{port}{path}", "field", "a")
        except ApiError as refused:
            assert refused.status == 400

    assert all("X: y" not in head.splitlines() for head in asked)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.2", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1"),
        *("fec0::1", "ff02::1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::10.0.0.1"),
        *("::ffff:0:10.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b:1::1", "2002:a00:1::1"),
        *("2001:0:a00:1::1", "fe80::1%eth0", "nonsense"),
    ],
)
async def test_private_addresses_are_refused(address: str) -> None:
    assert not is_public(address)
    url = f"http://{HOST}/x.png"

    assert "not public" in await refusal(fetcher(1, address, domains=[HOST]), url)
    assert "not public" in await refusal(fetcher(1, "8.8.8.8", address, domains=[HOST]), url)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"]
)
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_public(address)


async def test_a_redirect_is_checked_like_the_first_url() -> None:
    def serve(path: str) -> bytes:
        if path == "/moved":
            return answer(b"", status="302 Found", more="Location: /here\r\n")
        if path == "/away":
            return answer(b"", status="307 x", more="Location: http://127.0.0.1:1/secret\r\n")
        if path == "/around":
            return answer(b"", status="301 x", more="Location: /around\r\n")
        return answer()

    async with serving(serve) as (port, _):
        fetching, url = fetcher(port), f"http://{HOST}:{port}"
        assert await fetching.fetch(f"{url}/moved", "field", "a") == PICTURE
        assert "no images from 127.0.0.1:1" in await refusal(fetching, f"{url}/away")
        assert "redirected more than 3 times" in await refusal(fetching, f"{url}/around")


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "127.0.0.1", "127.1", "0x7f.1", "0177.0.0.1", "2130706433", "0.0.0.0"),
        *("[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]"),
        "[2002:7f00:1::]",
    ],
)
@pytest.mark.parametrize("redirected", [False, True], ids=["asked", "redirected"])
async def test_no_form_of_an_address_leads_inside(host: str, redirected: bool) -> None:
    """Resolved by the system, and though the host is allowed: by its URL, and by a redirect."""

    async def resolve(name: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"] if name == HOST else await addresses_of(name, port)

    async with serving(lambda _: answer()) as (inner, asked):
        url = f"http://{host}:{inner}/secret.png"
        moved = answer(b"", status="302 Found", more=f"Location: {url}\r\n")
        async with serving(lambda _: moved) as (port, _):
            checked: list[str] = []

            def permits(address: str) -> bool:
                checked.append(address)
                return is_public(address) or checked == ["127.0.0.1"]  # the host that redirects

            name = host.strip("[]")
            fetching = Fetcher(
                (f"{HOST}:{port}", f"{name}:{inner}"),
                MAX_BYTES,
                resolve=resolve,
                permits=permits if redirected else is_public,
            )
            start = f"http://{HOST}:{port}/" if redirected else url
            assert "not public" in await refusal(fetching, start)
        assert asked == []


async def test_a_name_is_resolved_once_for_a_connection() -> None:
    """The second address of a name that changes is never used."""
    resolved: list[str] = []

    async def resolve(_host: str, _port: int) -> Sequence[str]:
        resolved.append("10.0.0.1" if resolved else "127.0.0.1")
        return resolved[-1:]

    async with serving(lambda _: answer()) as (port, _):
        fetching = Fetcher(
            (f"{HOST}:{port}",),
            MAX_BYTES,
            resolve=resolve,
            permits=lambda address: address == "127.0.0.1",
        )
        assert await fetching.fetch(f"http://{HOST}:{port}/", "field", "a") == PICTURE
        assert resolved == ["127.0.0.1"]
        assert "not public" in await refusal(fetching, f"http://{HOST}:{port}/")


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (answer(status="404 Not Found"), "status 404"),
        (answer(kind="text/html"), "text/html, not an image"),
        (answer(more="Content-Encoding: gzip\r\n"), "compressed"),
        (answer(b"x" * (MAX_BYTES + 1)), "at most 10000 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n" + b"x" * 20_000, "at most 10000"),
        (answer()[:-5], "does not answer"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50_000, "does not answer"),
        (b"SSH-2.0-OpenSSH\r\n", "does not answer"),
        (b"", "does not answer"),
    ],
)
async def test_other_answers_are_refused(sent: bytes, reason: str) -> None:
    async with serving(lambda _: sent) as (port, _):
        assert reason in await refusal(fetcher(port), f"http://{HOST}:{port}/x.png")


async def test_a_tenants_slow_fetches_leave_a_place_for_others() -> None:
    arrived, ended = asyncio.Semaphore(0), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/slow" in head:
            arrived.release()
            await ended.wait()
        writer.write(answer())
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        fetching, url = fetcher(port), f"http://{HOST}:{port}"
        slow = [
            asyncio.create_task(fetching.fetch(f"{url}/slow", "field", "a"))
            for _ in range(MOST_AT_ONCE + 4)
        ]
        for _ in range(MOST_AT_ONCE - 1):
            await arrived.acquire()
        assert await fetching.fetch(f"{url}/", "field", "b") == PICTURE
        ended.set()
        assert set(await asyncio.gather(*slow)) == {PICTURE}


async def test_a_host_that_does_not_answer_is_given_up() -> None:
    ended = asyncio.Event()

    async def handle(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    async def resolve(_host: str, _port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        fetching = Fetcher(
            (f"{HOST}:{port}",), MAX_BYTES, resolve=resolve, permits=bool, seconds=0.05
        )
        assert "not fetched within" in await refusal(fetching, f"http://{HOST}:{port}/")
        ended.set()
