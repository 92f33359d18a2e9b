"""Questions to a running Redis or Valkey: does it answer, can it keep the queue's promises."""

import asyncio
from contextlib import suppress

import redis.asyncio
import redis.exceptions

from headrace_common.errors import BackendUnavailable, BackendUnfit, SettingsError
from headrace_common.protocol.connection import Connection, ConnectionConfig, check_backend
from headrace_common.protocol.endpoint import masked

from .errors import UsageError

_PROBE_SECONDS = 0.1


async def until_answering(url: str) -> None:
    """Returns when the server answers PING: it has loaded its data."""
    client = redis.asyncio.Redis.from_url(url)
    try:
        while True:
            with suppress(redis.exceptions.ConnectionError):
                await client.ping()
                return
            await asyncio.sleep(_PROBE_SECONDS)
    finally:
        await client.aclose()


async def check_redis(url: str) -> None:
    """Raises UsageError where the server is not reachable or cannot keep the queue's promises."""
    try:
        connection = Connection(ConnectionConfig(url=url))
    except SettingsError as error:
        raise UsageError(f"{masked(url)} is no Redis URL", str(error)) from error
    try:
        await check_backend(connection)
    except BackendUnavailable as error:
        raise UsageError(
            f"cannot use Redis at {masked(url)} ({str(error).rstrip('.')})",
            "start it, or leave out --redis and REDIS_URL for an embedded one",
        ) from error
    except BackendUnfit as error:
        raise UsageError(f"{masked(url)} is not fit for the queue", str(error)) from error
    finally:
        await connection.close()
