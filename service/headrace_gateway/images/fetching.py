"""Fetches images from hosts that the settings allow.

Each name is resolved once, and the connection goes to an address that was checked. So neither a
redirect nor a change of the name's address leads to a host of the private network.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import urljoin, urlsplit

from headrace_common.pools.fair_slots import FairSlots, SlotsFull

from ..errors import ApiError, busy
from .addresses import is_public
from .data_urls import invalid_image, too_many_bytes
from .http_response import HttpResponse, ResponseError

BUSY = "images_busy"
FETCH_S = 10.0
MOST_REDIRECTS = 3
MOST_AT_ONCE = 16
MOST_WAITING = 256
MOST_WAITING_OF_TENANT = 128
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class _Refused(Exception):
    """The image is not fetched; the text is for the client."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A host that is allowed, and what to ask it for."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def name(self) -> str:
        """Returns the content of the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


async def addresses_of(host: str, port: int) -> Sequence[str]:
    """Returns the addresses of a name. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=1)
    return [str(address[0]) for *_, address in found]


class Fetcher:
    """Fetches images for clients. Use it on one event loop.

    `domains` are names of hosts, with a port if it is not the scheme's own. `resolve` and `permits`
    are for tests.
    """

    def __init__(
        self,
        domains: Collection[str],
        max_bytes: int,
        *,
        resolve: Resolve = addresses_of,
        permits: Callable[[str], bool] = is_public,
        seconds: float = FETCH_S,
    ) -> None:
        self._domains = frozenset(domain.lower() for domain in domains)
        self._max_bytes = max_bytes
        self._resolve = resolve
        self._permits = permits
        self._seconds = seconds
        self._slots = FairSlots(
            MOST_AT_ONCE, most=MOST_WAITING, most_of_tenant=MOST_WAITING_OF_TENANT
        )

    async def fetch(self, url: str, name: str, tenant: str) -> bytes:
        """Returns the bytes of an image. Raises ApiError, which calls the field `name`."""
        if not self._domains:
            raise invalid_image(name, "this server fetches no images: send a data: URL")
        try:
            async with asyncio.timeout(self._seconds), self._slots.hold(tenant):
                return await self._follow(url, partial(too_many_bytes, name, self._max_bytes))
        except SlotsFull as full:
            message = "Too many images are being fetched; send the request again."
            raise busy(message, code=BUSY, of_tenant=full.tenant) from full
        except _Refused as refused:
            raise invalid_image(name, str(refused)) from refused
        except TimeoutError as error:
            raise invalid_image(name, f"not fetched within {self._seconds:g} s") from error
        except (OSError, ResponseError, ssl.SSLError) as error:
            raise invalid_image(name, "its host cannot be reached, or does not answer") from error

    async def _follow(self, url: str, too_large: Callable[[], ApiError]) -> bytes:
        for _ in range(1 + MOST_REDIRECTS):
            response = await self._get(self._place(url), too_large)
            if response.status not in _REDIRECTS:
                return _content(response)
            url = urljoin(url, response.headers.get("location", ""))
        raise _Refused(f"it is redirected more than {MOST_REDIRECTS} times")

    def _place(self, url: str) -> _Place:
        """Returns where a URL leads. Raises _Refused unless it is allowed."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise _Refused("it is not a URL") from None
        default = _PORTS.get(parts.scheme)
        if default is None or parts.hostname is None or "@" in parts.netloc:
            raise _Refused(
                "an image is at an http: or https: URL without a user, or in a data: URL"
            )
        host = parts.hostname.rstrip(".")
        allowed = host if port in (None, default) else f"{host}:{port}"
        if allowed not in self._domains:
            raise _Refused(
                f"this server fetches no images from {allowed[:100]} (allowed_media_domains); send "
                "a data: URL"
            )
        target = parts.path or "/"
        target += f"?{parts.query}" if parts.query else ""
        if not target.isascii() or any(char <= " " or char == "\x7f" for char in target):
            raise _Refused("it is not a URL: escape its special characters")
        return _Place(parts.scheme, host, port or default, target)

    async def _get(self, place: _Place, too_large: Callable[[], ApiError]) -> HttpResponse:
        addresses = await self._resolve(place.host, place.port)
        if not addresses or not all(map(self._permits, addresses)):
            raise _Refused("its host has an address that is not public")
        secure = ssl.create_default_context() if place.scheme == "https" else None
        reader, writer = await asyncio.open_connection(
            addresses[0],
            place.port,
            ssl=secure,
            server_hostname=place.host if secure is not None else None,
        )
        try:
            writer.write(_request(place))
            await writer.drain()
            response = HttpResponse(self._max_bytes)
            while not response.complete:
                data = await reader.read(65_536)
                if not data:
                    response.end()
                    break
                response.feed(data)
                if response.too_large:
                    raise too_large()
            return response
        finally:
            writer.transport.abort()


def _request(place: _Place) -> bytes:
    lines = (
        f"GET {place.target} HTTP/1.1",
        f"Host: {place.name}",
        "Accept: image/png, image/jpeg, image/webp, image/gif",
        "Accept-Encoding: identity",
        "User-Agent: headrace",
        "Connection: close",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def _content(response: HttpResponse) -> bytes:
    if response.status != 200:
        raise _Refused(f"its host answers with status {response.status}")
    kind = response.headers.get("content-type", "")
    if not kind.lower().startswith("image/"):
        raise _Refused(f"its host says that it is {kind[:60] or 'of no type'}, not an image")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise _Refused("its host sends it compressed")
    return response.body
