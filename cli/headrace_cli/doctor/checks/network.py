"""Checks the queue server and the API's port."""

import asyncio
from collections.abc import Iterator

from headrace_common.protocol.redis.client.endpoint import masked

from ...errors import UsageError
from ...servers.queue_server import check_redis, clock_notice
from ...servers.valkey import find_server
from ...sockets import is_free
from .finding import Finding, fail, ok, warning


def queue(redis_url: str | None) -> Iterator[Finding]:
    """Checks the given Redis, or that there is a server to start."""
    try:
        if redis_url is None:
            server = find_server()
            yield ok("queue", f"will start {server.path.name} {server.version} ({server.source})")
        else:
            asyncio.run(check_redis(redis_url))
            yield ok("queue", f"{masked(redis_url)} is fit")
    except UsageError as error:
        yield fail("queue", error.problem, error.remedy)


def clock(redis_url: str) -> Iterator[Finding]:
    """Checks whether this machine's clock agrees with Redis'; nothing if Redis is unreachable."""
    try:
        notice = asyncio.run(clock_notice(redis_url))
    except UsageError:
        return  # the check of the queue reports it
    if notice is None:
        yield ok("clock", "agrees with that of Redis to within some seconds")
    else:
        yield warning("clock", notice, "let both machines follow one time server (NTP)")


def port(host: str, number: int) -> Iterator[Finding]:
    if is_free(host, number):
        yield ok("port", f"{host}:{number} is free")
    else:
        yield fail(
            "port", f"{host}:{number} is in use", "stop what uses it or choose another --port"
        )
