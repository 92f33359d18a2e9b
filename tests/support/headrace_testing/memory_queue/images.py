"""Images of requests in memory, as KEEPIMAGE and DROPIMAGE store them; here nothing expires."""

from headrace_common.errors import ImagesFull
from headrace_common.protocol.base import QueueLimits
from headrace_common.wire import keys
from headrace_common.wire.messages import GenerateRequest

from .backend import MemoryBackend
from .shards import Shard


def keep_images(
    backend: MemoryBackend, request: GenerateRequest, limits: QueueLimits | None
) -> None:
    """Stores the images that are not stored. Raises ImagesFull."""
    backend.check()
    shard = _shard(backend, request)
    for image in request.images:
        if image.digest not in shard.images:
            if image.data is None:
                continue
            if limits is not None:
                _check(shard, request.tenant, len(image.data.encoded), limits)
            shard.images[image.digest] = image.data.encoded
            shard.image_tenants[image.digest] = request.tenant
        shard.image_requests[image.digest].add(request.request_id)


def drop_images(backend: MemoryBackend, request: GenerateRequest) -> None:
    """Drops the images that no other request needs."""
    backend.check()
    shard = _shard(backend, request)
    for image in request.images:
        shard.image_requests[image.digest].discard(request.request_id)
        if not shard.image_requests[image.digest]:
            shard.images.pop(image.digest, None)
            shard.image_tenants.pop(image.digest, None)


def _check(shard: Shard, tenant: str, size: int, limits: QueueLimits) -> None:
    own = [len(shard.images[digest]) for digest, of in shard.image_tenants.items() if of == tenant]
    if sum(own) + size > limits.max_tenant_image_bytes:
        raise ImagesFull(f"more than {limits.max_tenant_image_bytes} bytes of images")
    if len(own) + 1 > limits.max_tenant_images:
        raise ImagesFull(f"more than {limits.max_tenant_images} images")


def _shard(backend: MemoryBackend, request: GenerateRequest) -> Shard:
    return backend.shard(request.model, keys.shard_of(request.request_id))
