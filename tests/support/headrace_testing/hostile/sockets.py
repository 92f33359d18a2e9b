"""Attacks that are not a single exchange: many connections, slow clients, clients that never
read."""

import asyncio
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from .attack import PATIENCE_S, Answer, exchange, together

# The kernel's TCP states (net/tcp_states.h).
_CLOSED_BY_THE_OTHER = (7, 8)
_TCP_INFO = 11


async def many(port: int, requests: Sequence[bytes]) -> Answer:
    """Sends all of them at the same time, each on its own connection."""
    return await together(exchange(port, [request]) for request in requests)


async def crowd(port: int, count: int, sent: bytes, seconds: float) -> Answer:
    """Opens connections that send something and stay open for a while, until we close them."""
    held: list[socket.socket] = []
    loop = asyncio.get_running_loop()
    try:
        for _ in range(count):
            held.append(connection := socket.socket())
            connection.setblocking(False)
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await loop.sock_connect(connection, ("127.0.0.1", port))
                    await loop.sock_sendall(connection, sent)
        await asyncio.sleep(seconds)
    finally:
        for connection in held:
            connection.close()
    return Answer("left", seconds)


async def drip(port: int, count: int, beginning: bytes, seconds: float) -> Answer:
    """Opens connections that send a byte every half second."""
    ends = time.monotonic() + seconds

    async def one() -> None:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(beginning)
                while time.monotonic() < ends and not writer.is_closing():
                    writer.write(b"X")
                    await writer.drain()
                    await asyncio.sleep(0.5)
            finally:
                writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(count)))
    return Answer("left", seconds)


async def never_read(port: int, request: bytes, seconds: float) -> Answer:
    """Reads nothing of an answer for a while."""
    began = time.monotonic()
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(seconds):
                await loop.sock_connect(connection, ("127.0.0.1", port))
                await loop.sock_sendall(connection, request)
                while not _is_closed(connection):  # noqa: ASYNC110  # nothing tells of it
                    await asyncio.sleep(0.02)
                return Answer("closed", time.monotonic() - began)
    return Answer("left", seconds)


def _is_closed(connection: socket.socket) -> bool:
    info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)
    return info[0] in _CLOSED_BY_THE_OTHER


async def reset(port: int, request: bytes, count: int) -> Answer:
    """Sends complete requests and resets the connections at once."""
    began = time.monotonic()
    loop = asyncio.get_running_loop()
    for _ in range(count):
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await loop.sock_connect(connection, ("127.0.0.1", port))
                    await loop.sock_sendall(connection, request)
    return Answer("left", min(PATIENCE_S, time.monotonic() - began))
