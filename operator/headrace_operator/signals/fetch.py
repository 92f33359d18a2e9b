"""HTTP requests of the operator: without redirects, with complete answers only, and with their own
errors. A message never contains the other side's answer, because it ends up in the status of an
object that others may read."""

import asyncio
import socket
from contextlib import AbstractAsyncContextManager

import aiohttp

from ..errors import SignalsUnavailable
from ..spec.prometheus_urls import is_local

OK = 200


def session(*, local: bool = True) -> aiohttp.ClientSession:
    """A session without cookies. It accepts no compressed bodies: their size is known too late.

    `local` False refuses connections to the node itself and to metadata services, by any name.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(socket_factory=None if local else _remote_socket),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
    )


async def body(request: AbstractAsyncContextManager[aiohttp.ClientResponse], limit: int) -> bytes:
    """The whole body of an answer with status 200. Raises SignalsUnavailable."""
    try:
        async with request as reply:
            if reply.status != OK:
                raise SignalsUnavailable(f"the answer has HTTP status {reply.status}")
            return await _whole(reply.content, limit)
    except TimeoutError:
        raise SignalsUnavailable("no whole answer came in time") from None
    except aiohttp.ClientConnectorError as error:
        raise SignalsUnavailable(_no_connection(error)) from None
    except (aiohttp.ClientError, OSError, ValueError):
        raise SignalsUnavailable("the answer is not HTTP, or broke off") from None


async def _whole(content: aiohttp.StreamReader, limit: int) -> bytes:
    try:
        await content.readexactly(limit + 1)
    except asyncio.IncompleteReadError as end:
        return end.partial
    raise SignalsUnavailable(f"the answer has more than {limit} bytes; none of it is used")


class LocalAddress(OSError):
    """A connection to the node itself, or to a metadata service."""


def _remote_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, target = address
    if is_local(str(target[0])):
        raise LocalAddress
    return socket.socket(family, kind, protocol)


def _no_connection(error: aiohttp.ClientConnectorError) -> str:
    if isinstance(error.os_error, LocalAddress):
        return (
            "its name leads to the node or to a metadata service, where the operator sends no "
            "requests for a ModelService; if the URL is right, add it to the operator's "
            "prometheus_allowed_urls"
        )
    return "no connection"
