"""Checks that a running Redis or Valkey answers and can give the queue's guarantees."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import redis.asyncio
import redis.exceptions

from headrace_common.errors import BackendUnavailable, BackendUnfit, SettingsError
from headrace_common.protocol.redis.client.connection import (
    Connection,
    ConnectionConfig,
    check_backend,
)
from headrace_common.protocol.redis.client.endpoint import masked
from headrace_common.wire import keys

from ..errors import UsageError

_PROBE_SECONDS = 0.02
Answer = TypeVar("Answer")


async def until_answering(url: str) -> None:
    """Returns when the server answers PING, which means that it has loaded its data."""
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
    """Raises UsageError if the server is unreachable or cannot give the queue's guarantees."""
    await _asked(url, check_backend)


async def clock_notice(url: str) -> str | None:
    """A warning if this machine's clock differs from the server's; None if both agree.

    Raises UsageError if the server is not reachable.
    """

    async def compare(connection: Connection) -> str | None:
        await connection.measure_clock(keys.gateway_beat("doctor"))
        return connection.clock.notice()

    return await _asked(url, compare)


async def _asked(url: str, question: Callable[[Connection], Awaitable[Answer]]) -> Answer:
    try:
        connection = Connection(ConnectionConfig(url=url))
    except SettingsError as error:
        raise UsageError(f"{masked(url)} is not a Redis URL", str(error)) from error
    try:
        return await question(connection)
    except BackendUnavailable as error:
        raise UsageError(
            f"cannot use Redis at {masked(url)} ({str(error).rstrip('.')})",
            "start it, or leave out --redis and REDIS_URL for an embedded one",
        ) from error
    except BackendUnfit as error:
        raise UsageError(f"{masked(url)} is not fit for the queue", str(error)) from error
    finally:
        await connection.close()
