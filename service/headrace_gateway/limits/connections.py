"""How many connections may be open, and which gives way to a new one where all places are taken.

Clients cost a file descriptor each for as long as they like. The process keeps some for itself:
for Redis, health, metrics and files.
"""

import logging
import resource
from typing import Protocol

logger = logging.getLogger(__name__)

# Descriptors that are not for clients.
RESERVED = 64
# Further connections that are open only until they have read that there is no place.
ROOM = 16


class Connection(Protocol):
    def give_way(self) -> None:
        """Closes."""


class Places:
    """Of one listener. `most` connections may be open.

    Those that have not sent a whole request, or nothing since their last answer, give way to new
    ones, in the order in which they began to wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}

    @property
    def crowded(self) -> bool:
        """Whether more are open than may be, and all of them wait for answers."""
        return len(self._open) > self._most

    def take(self, connection: Connection) -> bool:
        """Whether a new connection may stay; makes room for it."""
        oldest = next(iter(self._idle), None)
        self._open.add(connection)
        self.idle(connection)
        if self.crowded and oldest is not None:
            self.leave(oldest)
            oldest.give_way()
        return len(self._open) <= self._most + ROOM

    def leave(self, connection: Connection) -> None:
        """It is closed, or will be at once."""
        self._open.discard(connection)
        self.busy(connection)

    def idle(self, connection: Connection) -> None:
        """It waits for its client."""
        self._idle[connection] = None

    def busy(self, connection: Connection) -> None:
        """Its client waits for an answer."""
        self._idle.pop(connection, None)


def most_connections(wanted: int) -> int:
    """As many connections as are wanted, or as the process may have beside its own descriptors.

    Raises the process's soft limit where that is in the way.
    """
    needed = wanted + RESERVED + ROOM
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    most = max(1, soft - RESERVED - ROOM)
    logger.warning(
        "fewer connections than max_connections: too few file descriptors",
        extra={"max_connections": wanted, "connections": most, "descriptors": soft},
    )
    return most
