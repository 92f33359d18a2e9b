"""Ids of new requests. Each names the shard of its model's queue."""

from headrace_common.protocol.shards import ShardAssigner
from headrace_common.wire.keys import new_request_id

from .engines import EngineDirectory


class RequestIds:
    """Spreads each tenant's requests evenly over the shards that all engines take from."""

    def __init__(self, engines: EngineDirectory, assigner: ShardAssigner | None = None) -> None:
        self._engines = engines
        self._assigner = assigner or ShardAssigner()

    async def new(self, queue: str, tenant: str) -> str:
        """Returns an id for a request of this tenant in this model's queue."""
        return new_request_id(await self.shard(queue, tenant))

    async def shard(self, queue: str, tenant: str) -> int:
        """Returns the shard for the tenant's next request."""
        return self._assigner.assign(queue, tenant, await self._engines.shards(queue))
