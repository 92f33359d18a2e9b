"""The stream of snapshots of a gateway."""

from collections.abc import AsyncGenerator
from typing import Any

import httpx
from pydantic import ValidationError

from ..errors import CliError
from ..sse import event_data
from .snapshot import Snapshot

PATH = "/console/live"
_CONNECT_SECONDS = 10.0
# A gateway sends at least one snapshot every 2 seconds.
_SILENT_SECONDS = 20.0


class Disconnected(CliError):
    """The gateway cannot be reached, or its stream broke; another try may succeed."""

    code = "disconnected"


class LiveStream:
    """The snapshots of the gateway at `url`, the address of its API with or without /v1."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def snapshots(self) -> AsyncGenerator[tuple[str, Snapshot]]:
        """Yields each snapshot as sent and as parsed.

        Raises CliError, and Disconnected at its end.
        """
        timeout = httpx.Timeout(_SILENT_SECONDS, connect=_CONNECT_SECONDS)
        try:
            async with (
                httpx.AsyncClient(headers=self._headers, timeout=timeout) as http,
                http.stream("GET", self._url + PATH) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    raise _refused(self._url, response.status_code, await response.aread())
                async for data in event_data(response.aiter_lines()):
                    yield data, _parsed(self._url, data)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise CliError(f"--url must be http(s)://host[:port], not {self._url!r}") from error
        except httpx.TransportError as error:
            raise Disconnected(
                f"cannot reach {self._url}: {error or type(error).__name__}. Is `headrace up` "
                "running? Name another deployment with --url"
            ) from error
        raise Disconnected(f"{self._url} ended the stream")


def _refused(url: str, status: int, body: bytes) -> CliError:
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return CliError(
            f"{url} wants an API key (HTTP {status}): give it with --api-key or OPENAI_API_KEY"
        )
    if status == httpx.codes.NOT_FOUND:
        return CliError(
            f"{url} has no live data: it is not a gateway of Headrace, or its setting `console` is "
            "off"
        )
    if status == httpx.codes.TOO_MANY_REQUESTS:
        return Disconnected(f"{url} has as many watchers as it takes: close one")
    kind = Disconnected if status >= httpx.codes.INTERNAL_SERVER_ERROR else CliError
    return kind(f"{url}: HTTP {status} {body[:200].decode(errors='replace')}".rstrip())


def _parsed(url: str, data: str) -> Snapshot:
    try:
        return Snapshot.model_validate_json(data)
    except ValidationError as error:
        first: Any = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CliError(
            f"{url} speaks another version of the live data ({where}: {first['msg']})"
        ) from error
