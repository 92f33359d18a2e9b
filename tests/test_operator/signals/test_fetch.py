"""HTTP answers are read completely or not at all, without redirects, and are never shown."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from headrace_operator.errors import SignalsUnavailable
from headrace_operator.signals import fetch
from headrace_operator.signals.prometheus import PrometheusSignals
from headrace_operator.signals.scrape import ScrapedSignals
from headrace_operator.signals.signals import PodAddress
from headrace_operator.spec.prometheus_urls import PrometheusUrls
from headrace_testing.model_services import service

SECRET = "AKIAFAKEFAKEFAKE"  # another server's data
PIECE = 8_192
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[int]:
    """The port of a server that answers everything with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


def long_page(samples: int) -> bytes:
    """A long page whose last samples are the relevant ones."""
    lines = [
        f'headrace_http_requests_total{{gen_ai_request_model="m{n:05}",tenant="team-of-a-long-name",'
        f'http_response_status_code="200"}} {n}'
        for n in range(samples)
    ]
    depth = 'headrace_queue_depth{gen_ai_request_model="qwen"} 42'
    return "\n".join(["# TYPE headrace_http_requests counter", *lines, depth, ""]).encode()


def in_pieces(page: bytes) -> Handler:
    """Sends each piece when the previous one has left, so that readers receive them one by one."""

    async def answer(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        for start in range(0, len(page), PIECE):
            await reply.write(page[start : start + PIECE])
            await asyncio.sleep(0)
        await reply.write_eof()
        return reply

    return answer


async def scraped(port: int, *, page_limit: int = 8 * 2**20) -> int:
    """The waiting requests that one gateway at this port reports."""

    async def gateways() -> list[PodAddress]:
        return [PodAddress("g1", "127.0.0.1", port)]

    async with fetch.session() as session:
        signals = ScrapedSignals(session, gateways, timeout=30, page_limit=page_limit)
        found = await signals.read(service(), ())
    assert found.queue is not None
    return found.queue.waiting


async def test_a_long_page_is_read_to_its_end() -> None:
    page = long_page(20_000)
    assert len(page) > 1_660_000
    async with server(in_pieces(page)) as port:
        assert await scraped(port) == 42


async def test_a_page_over_the_limit_is_not_read_in_part() -> None:
    async with server(in_pieces(long_page(2_000))) as port:
        with pytest.raises(SignalsUnavailable, match=r"pod g1: .* more than 65536 bytes; none of"):
            await scraped(port, page_limit=65_536)


async def test_a_page_as_long_as_the_limit_is_read() -> None:
    page = long_page(100)
    async with server(in_pieces(page)) as port:
        assert await scraped(port, page_limit=len(page)) == 42


async def test_a_page_that_breaks_off_is_not_read_in_part() -> None:
    page = long_page(10)

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + page)
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(cut, "127.0.0.1", 0)
    async with listener:
        with pytest.raises(SignalsUnavailable, match="not HTTP, or broke off"):
            await scraped(listener.sockets[0].getsockname()[1])


async def error_of(answer: Handler, *, trusted: bool = True) -> str:
    """The message in a ModelService's status for a Prometheus that gives this answer."""
    async with server(answer) as port, fetch.session() as session:
        async with fetch.session(local=False) as remote:
            url = f"http://user:hunter2@localhost:{port}/prom"
            urls = PrometheusUrls(allowed=(f"http://localhost:{port}",) if trusted else ())
            signals = PrometheusSignals(session, remote, urls, timeout=30)
            with pytest.raises(SignalsUnavailable) as refusal:
                await signals.read(service(scaling={"prometheusUrl": url}), ())
    text = str(refusal.value)
    assert text.startswith(f"prometheus at http://localhost:{port}: ")
    assert SECRET not in text
    assert "hunter2" not in text
    return text.partition(f"{port}: ")[2]


async def test_redirects_are_not_followed() -> None:
    paths: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        paths.append(request.path)
        return web.Response(status=302, headers={"Location": "/latest/meta-data"}, text=SECRET)

    assert await error_of(answer) == "the answer has HTTP status 302"
    assert set(paths) == {"/prom/api/v1/query"}


async def test_redirects_of_pods_are_not_followed() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/metrics":
            raise web.HTTPFound("/elsewhere")
        return web.Response(body=long_page(1))

    async with server(answer) as port:
        with pytest.raises(SignalsUnavailable, match="HTTP status 302"):
            await scraped(port)


@pytest.mark.parametrize(
    ("status", "reason", "says"),
    [
        (200, "OK", "the answer is not one to a query"),
        (401, SECRET, "the answer has HTTP status 401"),
        (204, "OK", "the answer has HTTP status 204"),
    ],
)
async def test_no_part_of_an_answer_is_shown(status: int, reason: str, says: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        body = {"data": {"result": [SECRET]}} if status == 200 else None
        reply = web.json_response(body, status=status)
        reply.set_status(status, reason)
        return reply

    assert await error_of(answer) == says


async def test_a_long_answer_to_a_query_is_not_read() -> None:
    assert "more than 1048576 bytes" in await error_of(in_pieces(SECRET.encode() * 100_000))


async def test_answers_that_are_not_http_are_not_shown() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"220 {SECRET} ready\r\n".encode())
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, fetch.session() as session:
        with pytest.raises(SignalsUnavailable) as refusal:
            await fetch.body(session.get(f"http://127.0.0.1:{port}/"), 1_000)
    assert str(refusal.value) == "the answer is not HTTP, or broke off"


async def test_a_name_that_leads_to_the_node_is_not_connected_to() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        raise AssertionError("it was asked")

    assert "leads to the node or to a metadata service" in await error_of(answer, trusted=False)


async def test_a_slow_answer_ends_in_time() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        await asyncio.Event().wait()
        return reply

    async with server(answer) as port, fetch.session() as session:
        request = session.get(f"http://127.0.0.1:{port}/", timeout=aiohttp.ClientTimeout(total=0.2))
        with pytest.raises(SignalsUnavailable, match="in time"):
            await fetch.body(request, 1_000)


async def test_the_error_for_a_closed_port_is_our_own() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        async with fetch.session() as session:
            with pytest.raises(SignalsUnavailable) as refusal:
                await fetch.body(session.get(f"http://127.0.0.1:{port}/"), 1_000)
    assert str(refusal.value) == "no connection"
