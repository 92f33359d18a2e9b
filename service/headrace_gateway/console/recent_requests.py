"""The last requests of a tenant, of this gateway and, while consoles show them, of all others.

Gateways write what they know to Redis only for tenants that a console shows. What a gateway reads
there is kept for a moment, so that many consoles cost no more than one.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace_common.errors import HeadraceError

from ..queue_client.request_history import MAX_REQUESTS, RequestHistory

logger = logging.getLogger(__name__)

# seconds for which other gateways write a tenant's requests after a console has asked
SHOWN_S = 10.0
POLL_S = 3.0  # seconds between two checks for such tenants while there are none
WRITE_S = 1.0
KEPT_S = 1.0
STALE_S = 15.0  # seconds for which a dead gateway's last data are shown
MAX_KEPT = 256

Clock = Callable[[], float]
Content = dict[str, Any]


class SharedRequests(Protocol):
    """The requests that gateways share. Raises BackendUnavailable."""

    gateway_id: str

    async def show(self, tenant: str, until: float) -> None:
        """Tells all gateways that a console shows the tenant's requests until then."""

    async def shown(self) -> Sequence[str]:
        """The tenants whose requests a console shows."""

    async def write(self, tenant: str, content: bytes) -> None:
        """Writes what this gateway knows of the tenant's requests."""

    async def read(self, tenant: str) -> Mapping[str, bytes]:
        """The recent requests by gateway."""


@dataclass(frozen=True, slots=True)
class _Kept:
    at: float
    requests: list[Content]


class RecentRequests:
    """The last requests of tenants. `clock` is Redis'. Without `shared` only this gateway's."""

    def __init__(
        self, history: RequestHistory, shared: SharedRequests | None, clock: Clock
    ) -> None:
        self._history = history
        self._shared = shared
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self._wrote: dict[str, bytes] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._shared is not None:
            self._task = asyncio.create_task(self._share(self._shared), name="console requests")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def of(self, tenant: str, allows: Callable[[str], bool]) -> list[Content]:
        """Returns the tenant's requests for models that `allows` accepts, the newest first."""
        found: dict[str, Content] = {}
        for content in [*self._own(tenant), *await self._others(tenant)]:
            known = found.setdefault(content["id"], content)
            if _progress(content) > _progress(known):
                found[content["id"]] = content
        allowed = [content for content in found.values() if allows(content["model"])]
        return sorted(allowed, key=_accepted, reverse=True)[:MAX_REQUESTS]

    def _own(self, tenant: str) -> list[Content]:
        return [timeline.content() for timeline in self._history.of(tenant)]

    async def _others(self, tenant: str) -> list[Content]:
        if self._shared is None:
            return []
        now = self._clock()
        kept = self._kept.get(tenant)
        if kept is not None and 0 <= now - kept.at < KEPT_S:
            return kept.requests
        try:
            await self._shared.show(tenant, now + SHOWN_S)
            written = await self._shared.read(tenant)
        except HeadraceError as error:
            logger.debug("requests of other gateways not read", extra={"error": str(error)})
            return []
        own = self._shared.gateway_id
        requests = [
            content
            for gateway_id, data in written.items()
            if gateway_id != own
            for content in _read(data, now)
        ]
        self._kept = {t: k for t, k in self._kept.items() if 0 <= now - k.at < KEPT_S}
        if len(self._kept) < MAX_KEPT:
            self._kept[tenant] = _Kept(now, requests)
        return requests

    async def _share(self, shared: SharedRequests) -> None:
        while True:
            try:
                tenants = await shared.shown()
                for tenant in tenants:
                    await self._write(shared, tenant)
                self._wrote = {t: data for t, data in self._wrote.items() if t in tenants}
            except HeadraceError as error:
                tenants = ()
                logger.debug("requests not shared", extra={"error": str(error)})
            await asyncio.sleep(WRITE_S if tenants else POLL_S)

    async def _write(self, shared: SharedRequests, tenant: str) -> None:
        requests = self._own(tenant)
        if requests or tenant in self._wrote:
            body = {"at": self._clock(), "requests": requests}
            self._wrote[tenant] = b""
            await shared.write(tenant, json.dumps(body).encode())


def _read(data: bytes, now: float) -> list[Content]:
    """Another gateway's requests; empty if they are too old or have another version's format."""
    try:
        body = json.loads(data)
        if now - body["at"] > STALE_S:
            return []
        requests = list(body["requests"])[:MAX_REQUESTS]
        for content in requests:
            content["id"], content["model"], _accepted(content), _progress(content)
    except (ValueError, TypeError, KeyError) as error:
        logger.warning("requests of another gateway unreadable", extra={"error": str(error)})
        return []
    return requests


def _accepted(content: Content) -> float:
    return float(content["times"]["accepted"])


def _progress(content: Content) -> int:
    """Chooses, of two gateways' entries for a request, the one that knows more."""
    ended = content["state"] != "running"
    return len(content["events"]) + (1000 if ended else 0)
