"""Limits the open connections, and decides which one closes for a new one.

Each client uses a file descriptor for as long as it likes. The process reserves some for itself:
for Redis, health, metrics and files.
"""

import logging
import resource
from functools import cache
from typing import Protocol

logger = logging.getLogger(__name__)

# Descriptors that are reserved for the process.
RESERVED = 64
# The part of the connections that one tenant's open requests may take.
TENANT_SHARE = 0.75
# The number of further connections, which stay open until they have read that the server is full.
SURPLUS = 16


class Connection(Protocol):
    def give_way(self) -> None:
        """Closes."""


class ConnectionLimit:
    """Limits one listener's open connections to `most`.

    A connection is idle while it has not sent a whole request, or has sent nothing since its last
    answer. Idle connections close for new ones, the longest idle first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}

    @property
    def crowded(self) -> bool:
        """Whether too many connections are open, none of which is idle."""
        return len(self._open) > self._most

    def take(self, connection: Connection) -> bool:
        """Adds a new connection, and closes the oldest idle one if needed; returns whether it may
        stay."""
        oldest = next(iter(self._idle), None)
        self._open.add(connection)
        self.idle(connection)
        if self.crowded and oldest is not None:
            self.leave(oldest)
            oldest.give_way()
        return len(self._open) <= self._most + SURPLUS

    def leave(self, connection: Connection) -> None:
        """Removes a connection that is closed, or is about to be."""
        self._open.discard(connection)
        self.busy(connection)

    def idle(self, connection: Connection) -> None:
        """Notes that a connection waits for its client."""
        self._idle[connection] = None

    def busy(self, connection: Connection) -> None:
        """Notes that a connection's client waits for an answer."""
        self._idle.pop(connection, None)


def tenant_share(connections: int) -> int:
    """Returns how many of the connections one tenant's open requests may take."""
    return max(1, int(connections * TENANT_SHARE))


@cache
def most_connections(wanted: int) -> int:
    """Returns how many connections are possible: as many as wanted, or as descriptors allow.

    Raises the process's soft limit if it is too low.
    """
    needed = wanted + RESERVED + SURPLUS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    most = max(1, soft - RESERVED - SURPLUS)
    logger.warning(
        "max_connections lowered: the process may open too few files; raise its limit (ulimit -n)",
        extra={"max_connections": wanted, "connections": most, "descriptors": soft},
    )
    return most
