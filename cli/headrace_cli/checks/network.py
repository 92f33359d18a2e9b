"""The queue server and the API's port."""

import asyncio
from collections.abc import Iterator

from headrace_common.protocol.endpoint import masked

from ..errors import UsageError
from ..queue_server import check_redis
from ..sockets import is_free
from ..valkey import find_server
from .finding import Finding, fail, ok


def queue(redis_url: str | None) -> Iterator[Finding]:
    """A given Redis must be reachable and fit; else there must be a server to start."""
    try:
        if redis_url is None:
            server = find_server()
            yield ok("queue", f"will start {server.path.name} {server.version} ({server.source})")
        else:
            asyncio.run(check_redis(redis_url))
            yield ok("queue", f"{masked(redis_url)} is fit")
    except UsageError as error:
        yield fail("queue", error.problem, error.remedy)


def port(host: str, number: int) -> Iterator[Finding]:
    if is_free(host, number):
        yield ok("port", f"{host}:{number} is free")
    else:
        yield fail(
            "port", f"{host}:{number} is in use", "stop what uses it or choose another --port"
        )
