"""Ids of new requests, which name the shard of their model's queue that each one goes to."""

from headrace_common.keys import new_request_id
from headrace_common.protocol.shards import Dealer

from .engines import EngineDirectory


class RequestIds:
    """Spreads each tenant's requests evenly over the shards that all engines take from."""

    def __init__(self, engines: EngineDirectory, dealer: Dealer | None = None) -> None:
        self._engines = engines
        self._dealer = dealer or Dealer()

    async def new(self, queue: str, tenant: str) -> str:
        """An id for a request of this tenant in this model's queue."""
        return new_request_id(await self.shard(queue, tenant))

    async def shard(self, queue: str, tenant: str) -> int:
        """The shard for the tenant's next request."""
        return self._dealer.deal(queue, tenant, await self._engines.shards(queue))
