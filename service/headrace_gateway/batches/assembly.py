"""Puts the parts of batches together: the store, what clients do with it, and who leads."""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp

from headrace_common.protocol.connection import Connection
from headrace_common.protocol.redis_batches import RedisBatches
from headrace_common.protocol.redis_files import RedisFiles

from ..api_keys import KeyFile
from ..keeping import Keeping
from ..settings import GatewaySettings
from ..tenant_stores import TenantStores
from .desk import Desk, DeskLimits
from .internal import InternalClient
from .run import BatchLimits, BatchMetrics, BatchSite

# What a line has around its request's body, with some blanks.
ENVELOPE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Storage:
    """Where files and batches are kept. `leader` is this gateway's name among those that lead,
    `clock` Redis' in Unix seconds."""

    files: RedisFiles
    batches: RedisBatches
    leader: str
    clock: Callable[[], float]


def open_storage(connection: Connection, leader: str) -> Storage:
    clock = connection.clock.now
    return Storage(RedisFiles(connection), RedisBatches(connection), leader, clock)


def make_site(
    app: ASGIApp,
    storage: Storage,
    settings: GatewaySettings,
    keeping: Keeping,
    stores: TenantStores,
    metrics: BatchMetrics,
    keys: KeyFile | None,
) -> BatchSite:
    """What this gateway's batches work with."""
    limits = BatchLimits(
        max_lines=settings.max_batch_requests,
        max_line_bytes=settings.max_body_bytes + ENVELOPE_BYTES,
        max_output_bytes=settings.max_batch_output_bytes,
        concurrency=settings.batch_concurrency,
        max_deadline=settings.max_deadline,
    )
    return BatchSite(
        leader=storage.leader,
        batches=storage.batches,
        files=storage.files,
        client=InternalClient(app),
        keeping=keeping,
        stores=stores,
        metrics=metrics,
        find_key=None if keys is None else lambda key_id: keys.ring.named(key_id),
        limits=limits,
        clock=storage.clock,
    )


def make_desk(
    storage: Storage,
    settings: GatewaySettings,
    stores: TenantStores,
    changed: Callable[[], None],
) -> Desk:
    limits = DeskLimits(
        max_file_bytes=settings.max_file_bytes,
        file_ttl=int(settings.file_ttl),
        max_open_batches=settings.max_open_batches,
    )
    return Desk(
        files=storage.files,
        batches=storage.batches,
        stores=stores,
        limits=limits,
        changed=changed,
        clock=storage.clock,
    )
