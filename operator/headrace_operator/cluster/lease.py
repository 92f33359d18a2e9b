"""Leader election by a Lease of coordination.k8s.io, so that only one operator writes.

As in client-go, other clocks are not trusted: a Lease has expired when this process has seen it
unchanged for its duration. Writes carry the resource version, so two claims cannot both succeed.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ..errors import ClusterError, Conflict, NotFound
from .cluster import Cluster

logger = logging.getLogger(__name__)
Manifest = dict[str, Any]

_API, _KIND = "coordination.k8s.io/v1", "Lease"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderLeaseConfig:
    """`duration` seconds without renewal end a leadership; `retry` seconds between two tries."""

    namespace: str
    name: str
    identity: str
    duration: float = 15.0

    @property
    def retry(self) -> float:
        return self.duration / 6

    @property
    def renewal_limit(self) -> float:
        """Seconds without renewal after which a leader gives up, before others may take over."""
        return self.duration * 2 / 3


class LeaderLease:
    """The leadership of one process. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        cluster: Cluster,
        config: LeaderLeaseConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._clock = clock
        self._seen: tuple[str, float] = ("", -float("inf"))

    async def acquire(self) -> None:
        """Returns when this process leads."""
        while not await self._tried():  # noqa: ASYNC110 - the API server has no event for it
            await asyncio.sleep(self._config.retry)
        logger.info("this process leads", extra={"lease": self._config.name})

    async def keep(self) -> None:
        """Renews the Lease; returns when the leadership is lost."""
        renewed = self._clock()
        while self._clock() - renewed < self._config.renewal_limit:
            await asyncio.sleep(self._config.retry)
            if await self._tried():
                renewed = self._clock()
        logger.error("leadership lost, the process ends", extra={"lease": self._config.name})

    async def release(self) -> None:
        """Releases the Lease, so that another process can lead immediately."""
        try:
            lease = await self._read()
            if lease is not None and holder_of(lease) == self._config.identity:
                lease["spec"]["holderIdentity"] = ""
                await self._cluster.replace(lease)
        except ClusterError as error:
            logger.warning("lease not released, it expires", extra={"error": str(error)})

    async def _tried(self) -> bool:
        """Tries once to get or renew the Lease."""
        try:
            async with asyncio.timeout(self._config.renewal_limit / 2):
                return await self._try()
        except (ClusterError, TimeoutError) as error:
            text = str(error) or type(error).__name__
            logger.warning("lease not written, tried again", extra={"error": text})
            return False

    async def _try(self) -> bool:
        lease = await self._read()
        try:
            if lease is None:
                await self._cluster.create(claimed(None, self._config, datetime.now(UTC)))
                return True
            if not self._free(lease):
                return False
            await self._cluster.replace(claimed(lease, self._config, datetime.now(UTC)))
        except Conflict:
            return False
        return True

    async def _read(self) -> Manifest | None:
        try:
            return await self._cluster.get(_API, _KIND, self._config.namespace, self._config.name)
        except NotFound:
            return None

    def _free(self, lease: Manifest) -> bool:
        """Whether the Lease is this process's, has no holder, or has expired."""
        version = lease["metadata"].get("resourceVersion", "")
        if version != self._seen[0]:
            self._seen = (version, self._clock())
        holder = holder_of(lease)
        if holder in ("", self._config.identity):
            return True
        duration = float(lease["spec"].get("leaseDurationSeconds") or self._config.duration)
        return self._clock() - self._seen[1] >= duration


def holder_of(lease: Manifest) -> str:
    return lease.get("spec", {}).get("holderIdentity") or ""


def claimed(lease: Manifest | None, config: LeaderLeaseConfig, now: datetime) -> Manifest:
    """The Lease with us as its holder."""
    stamp = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
    old = {} if lease is None else lease.get("spec", {})
    ours = old.get("holderIdentity") == config.identity
    spec = {
        "holderIdentity": config.identity,
        "leaseDurationSeconds": max(1, round(config.duration)),
        "acquireTime": old.get("acquireTime", stamp) if ours else stamp,
        "renewTime": stamp,
        "leaseTransitions": int(old.get("leaseTransitions") or 0)
        + (lease is not None and not ours),
    }
    meta = {"name": config.name, "namespace": config.namespace}
    metadata = meta if lease is None else lease["metadata"]
    return {"apiVersion": _API, "kind": _KIND, "metadata": metadata, "spec": spec}
