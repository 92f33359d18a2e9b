"""Builds what batches need: their storage, the service behind the routes, the context of a run."""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp

from headrace_common.protocol.redis.batches import RedisBatches
from headrace_common.protocol.redis.client.connection import Connection
from headrace_common.protocol.redis.files import RedisFiles

from ..generation.resumable_response import ResumableRequests
from ..images.intake import ImageIntake
from ..limits.api_keys import KeyFile
from ..limits.tenant_stores import TenantStores
from ..settings import GatewaySettings
from .batch_service import BatchService, BatchServiceLimits
from .internal import InternalClient
from .run import BatchContext, BatchLimits, BatchMetrics

# Bytes that a line of a batch may have besides its request's body.
ENVELOPE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Storage:
    """Where files and batches are stored.

    `leader` is the name by which this gateway leads batches. `clock` returns the Unix seconds of
    Redis.
    """

    files: RedisFiles
    batches: RedisBatches
    leader: str
    clock: Callable[[], float]


def open_storage(connection: Connection, leader: str) -> Storage:
    clock = connection.clock.now
    return Storage(RedisFiles(connection), RedisBatches(connection), leader, clock)


def make_batch_context(
    app: ASGIApp,
    storage: Storage,
    settings: GatewaySettings,
    resumable: ResumableRequests,
    stores: TenantStores,
    metrics: BatchMetrics,
    keys: KeyFile | None,
) -> BatchContext:
    """Returns the collaborators of this gateway's batches."""
    limits = BatchLimits(
        max_lines=settings.max_batch_requests,
        max_line_bytes=settings.max_body_bytes + ENVELOPE_BYTES,
        max_output_bytes=settings.max_batch_output_bytes,
        concurrency=settings.batch_concurrency,
        max_deadline=settings.max_deadline,
    )
    return BatchContext(
        leader=storage.leader,
        batches=storage.batches,
        files=storage.files,
        client=InternalClient(app),
        resumable=resumable,
        stores=stores,
        metrics=metrics,
        find_key=None if keys is None else lambda key_id: keys.ring.named(key_id),
        limits=limits,
        clock=storage.clock,
    )


def make_batch_service(
    storage: Storage,
    settings: GatewaySettings,
    images: ImageIntake,
    stores: TenantStores,
    changed: Callable[[], None],
) -> BatchService:
    limits = BatchServiceLimits(
        max_file_bytes=settings.max_file_bytes,
        file_ttl=int(settings.file_ttl),
        max_open_batches=settings.max_open_batches,
    )
    return BatchService(
        files=storage.files,
        batches=storage.batches,
        images=images,
        stores=stores,
        limits=limits,
        changed=changed,
        clock=storage.clock,
    )
