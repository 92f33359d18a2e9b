"""The queue over TLS: real certificates, checked on both sides."""

import asyncio
import re
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import psutil
import pytest

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.base import Outcome, QueueLimits
from headrace_common.protocol.redis.client.connection import (
    Connection,
    ConnectionConfig,
    check_backend,
)
from headrace_common.wire.messages import Tokens
from headrace_testing.backends import OverRedis, make_request
from headrace_testing.tls import Authority, TlsProxy
from headrace_testing.valkey import ValkeyServer
from headrace_testing.waiting import first


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(Path(tmp_path_factory.mktemp("authority")))


@pytest.fixture
async def proxy(valkey_server: ValkeyServer, authority: Authority) -> AsyncIterator[TlsProxy]:
    pair = authority.issue("server", "IP:127.0.0.1")
    async with TlsProxy(valkey_server.port, pair, authority) as proxy:
        yield proxy


@pytest.fixture
async def over_tls(proxy: TlsProxy, authority: Authority) -> AsyncIterator[OverRedis]:
    redis_backend = OverRedis(url_of(proxy, authority))
    await redis_backend.wipe()
    yield redis_backend
    await redis_backend.close()


def url_of(proxy: TlsProxy, authority: Authority) -> str:
    """The URL with the CA and a client's certificate."""
    pair = authority.issue("client", "DNS:client")
    return (
        f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={authority.certificate}"
        f"&ssl_certfile={pair.certificate}&ssl_keyfile={pair.key}"
    )


async def refusal(url: str, command_timeout: float = 5.0) -> str:
    connection = Connection(ConnectionConfig(url=url, command_timeout=command_timeout))
    try:
        with pytest.raises(BackendUnavailable) as refused:
            await check_backend(connection)
        return str(refused.value)
    finally:
        await connection.close()


async def test_a_request_and_its_answer_go_over_tls(over_tls: OverRedis) -> None:
    gateway, engine = over_tls.gateway(), over_tls.engine()
    await gateway.start()
    await engine.start()
    request = make_request(prompt=tuple(range(50_000)))
    await gateway.admit(request, QueueLimits(max_tokens=100_000))
    (lease,) = await engine.take(1)
    reply = Tokens(request_id=request.request_id, attempt=1, choice=0, index=0, token_ids=(7,))
    await engine.publish({"g": [reply]})
    (frame,) = await first(gateway.frames(), 1)
    assert (lease.request, frame.replies) == (request, (reply,))
    assert await engine.finish(request.request_id, lease.attempt, Outcome())


async def test_a_blocked_read_continues_after_its_connection_was_cut(
    over_tls: OverRedis, proxy: TlsProxy
) -> None:
    gateway, engine = over_tls.gateway(), over_tls.engine()
    await engine.start()
    waiting = asyncio.create_task(engine.wait())
    await asyncio.wait({waiting}, timeout=0.05)
    await proxy.cut()
    await gateway.admit(make_request(), QueueLimits())
    await asyncio.wait_for(waiting, 30)


async def test_a_server_of_another_authority_is_refused(
    proxy: TlsProxy, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path)
    pair = authority.issue("client", "DNS:client")
    url = f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={stranger.certificate}"
    client = f"&ssl_certfile={pair.certificate}&ssl_keyfile={pair.key}"
    assert "CERTIFICATE_VERIFY_FAILED" in (await refusal(url + client))


async def test_a_certificate_for_another_host_is_refused(
    valkey_server: ValkeyServer, authority: Authority
) -> None:
    other = authority.issue("other", "DNS:other.example")
    async with TlsProxy(valkey_server.port, other) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={authority.certificate}"
        assert "IP address mismatch" in await refusal(url)
        connection = Connection(ConnectionConfig(url=f"{url}&ssl_check_hostname=false"))
        await check_backend(connection)
        await connection.close()


async def test_a_server_may_ask_for_a_certificate(proxy: TlsProxy, authority: Authority) -> None:
    await refusal(f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={authority.certificate}")


async def test_a_client_without_tls_is_unavailable(proxy: TlsProxy) -> None:
    await refusal(f"redis://127.0.0.1:{proxy.port}/0")


async def test_a_refused_connection_leaves_no_socket(proxy: TlsProxy, tmp_path: Path) -> None:
    stranger = Authority(tmp_path)
    await refusal(f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={stranger.certificate}")
    assert sockets_to(proxy.port) == []


async def test_a_server_that_falls_silent_leaves_no_socket(authority: Authority) -> None:
    """The server does not answer when the client closes TLS, either."""
    async with silent_server(authority) as port:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority.certificate}"
        assert "no connection within 0.2 s" in await refusal(url, command_timeout=0.2)
        assert sockets_to(port) == []


@asynccontextmanager
async def silent_server(authority: Authority) -> AsyncIterator[int]:
    """The port of a server that shakes hands and reads no further."""
    pair = authority.issue("silent", "IP:127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    accepted: list[asyncio.StreamWriter] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cast(asyncio.Transport, writer.transport).pause_reading()
        accepted.append(writer)

    async with await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context) as server:
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            for writer in accepted:
                writer.transport.abort()


def sockets_to(port: int) -> list[int]:
    """This process's sockets that are connected to a port."""
    found = psutil.Process().net_connections("tcp")
    return [
        connection.fd for connection in found if connection.raddr and connection.raddr.port == port
    ]


def strictly_valid(authority: Path, certificate: Path) -> bool:
    verify = ["openssl", "verify", "-x509_strict", "-CAfile", str(authority), str(certificate)]
    return subprocess.run(verify, capture_output=True).returncode == 0


def test_certificates_pass_the_strict_check_of_python_3_13(authority: Authority) -> None:
    assert strictly_valid(authority.certificate, authority.issue("own", "DNS:own").certificate)


def test_documented_certificates_pass_the_strict_check(
    authority: Authority, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    (commands,) = re.findall(r"^```sh\n(openssl req.*?)^```", page, re.DOTALL | re.MULTILINE)
    subprocess.run(["sh", "-ec", commands], cwd=tmp_path, check=True, capture_output=True)
    assert strictly_valid(tmp_path / "ca.crt", tmp_path / "redis.crt")
