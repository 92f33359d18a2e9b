"""redis-py's connections, with commands packed by hiredis instead of in Python.

A command is one message of bytes then; what it says to the server is the same.
"""

from typing import Any

import hiredis
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection


class _Packing:
    """`pack_command` as redis-py calls it; a first word like `XINFO GROUPS` is two."""

    def pack_command(self, *args: Any) -> list[bytes]:
        name = args[0]
        words = name.split() if isinstance(name, str) else (name,)
        return [hiredis.pack_command((*words, *args[1:]))]


class PackedConnection(_Packing, Connection):
    """Over TCP."""


class PackedSSLConnection(_Packing, SSLConnection):
    """Over TLS."""


class PackedUnixConnection(_Packing, UnixDomainSocketConnection):
    """Over a socket of the file system."""
