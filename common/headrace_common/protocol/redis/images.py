"""Images of requests over Redis: stored once for all requests of a shard that name them."""

import asyncio
from functools import partial
from typing import Any

from ...errors import ImagesFull
from ...sealing.sealer import PayloadKind, opened, sealed
from ...wire import keys
from ...wire.images import ImageSpan
from ...wire.keys import ShardKeys
from ...wire.messages import GenerateRequest
from ..base import QueueLimits
from .client.connection import Connection

TRIES = 3
# Of the bounds that KEEPIMAGE names.
_BOUNDS = {
    b"bytes": "bytes of images (max_tenant_image_bytes)",
    b"items": "images (max_tenant_images)",
}


class RedisImages:
    """The gateway's side. Every call may be repeated."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def keep(self, request: GenerateRequest, limits: QueueLimits | None) -> None:
        """Stores a request's images that are not stored, and notes that the request needs them.

        Those that this process does not have are only noted. Raises ImagesFull; with `limits` None
        there is no bound, for a request that was accepted before.
        """
        distinct = list({image.digest: image for image in request.images}.values())
        await asyncio.gather(*(self._keep(request, image, limits) for image in distinct))

    async def _keep(
        self, request: GenerateRequest, image: ImageSpan, limits: QueueLimits | None
    ) -> None:
        bounds: tuple[int | str, ...] = ("", "")
        if limits is not None:
            bounds = (limits.max_tenant_image_bytes, limits.max_tenant_images)
        reply = await self._run(request, image, b"", *bounds)
        if reply[0] == b"absent" and image.data is not None:
            binding = _binding(request, image.digest)
            data = await sealed(
                self._connection.sealer, PayloadKind.IMAGE, binding, image.data.encoded
            )
            reply = await self._run(request, image, data, *bounds)
        if reply[0] in _BOUNDS:
            raise ImagesFull(
                f"with this image, this tenant's requests for {request.model} would have more than "
                f"{int(reply[1])} {_BOUNDS[reply[0]]}; try again when some of them have ended"
            )

    async def _run(
        self, request: GenerateRequest, image: ImageSpan, data: bytes, *bounds: int | str
    ) -> list[Any]:
        left = request.deadline_ms - self._connection.clock.now_ms() + keys.GRACE_MS
        name = self._name(image.digest)
        arguments = [request.request_id, max(1, left), name.hex(), data, *bounds]
        reply: list[Any] = await self._connection.run(
            "keepimage", _keys(request, name), arguments, tries=TRIES
        )
        return reply

    async def drop(self, request: GenerateRequest) -> None:
        """Notes that a request does not need its images any more."""
        names = {self._name(image.digest) for image in request.images}
        await asyncio.gather(*(self._drop(request, name) for name in names))

    async def _drop(self, request: GenerateRequest, name: bytes) -> None:
        arguments = [request.request_id, keys.ENDED_TTL_MS, name.hex()]
        await self._connection.run("dropimage", _keys(request, name), arguments, tries=TRIES)

    def _name(self, digest: bytes) -> bytes:
        """The digest as Redis may see it."""
        return self._connection.sealer.digests(digest)[0]


async def read_image(
    connection: Connection, request: GenerateRequest, digest: bytes
) -> bytes | None:
    """See EngineQueue.image."""
    shard = _shard(request)
    for name in connection.sealer.digests(digest):
        command = ("GET", shard.image(name))
        (data,) = await connection.attempt(
            partial(connection.client.pipeline, [command]), tries=TRIES
        )
        if isinstance(data, bytes):
            binding = _binding(request, digest)
            return await opened(connection.sealer, PayloadKind.IMAGE, binding, data)
    return None


def _keys(request: GenerateRequest, name: bytes) -> list[str]:
    shard = _shard(request)
    return [shard.image(name), shard.image_requests(name), shard.tenant_images(request.tenant)]


def _shard(request: GenerateRequest) -> ShardKeys:
    return ShardKeys(request.model, keys.shard_of(request.request_id))


def _binding(request: GenerateRequest, digest: bytes) -> tuple[str, str]:
    return (request.model, digest.hex())
