"""Opens sockets that `up` passes to its children. Nothing here waits."""

import errno
import socket
from contextlib import suppress

from .errors import UsageError

BACKLOG = 2048
# The port of the first engine of `headrace up`, if it is free.
FIRST_METRICS_PORT = 9400
_PORTS_TRIED = 200


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket to pass on, also to several processes.

    Raises UsageError if the port is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise UsageError(
            f"cannot listen on {host}:{port} ({error.strerror or error})",
            _remedy(error),
        ) from error
    sock.setblocking(False)
    return sock


def _remedy(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "choose another --port or --host, or stop the program that uses it"
    if error.errno == errno.EACCES:
        return "choose a --port from 1024 on"
    return "--host must be an address of this machine: 127.0.0.1, or 0.0.0.0 for all of them"


def listen_on_free_ports(count: int, *, host: str, start: int) -> list[socket.socket]:
    """Sockets that listen on the first `count` ports from `start` on that are free.

    They listen already, since another program could take a free port meanwhile. Raises UsageError.
    """
    found: list[socket.socket] = []
    for port in range(start, min(start + _PORTS_TRIED, 65536)):
        if len(found) == count:
            break
        with suppress(UsageError):
            found.append(listen(host, port))
    if len(found) < count:
        for sock in found:
            sock.close()
        raise UsageError(f"no {count} free ports between {start} and {start + _PORTS_TRIED}")
    return found


def is_free(host: str, port: int) -> bool:
    """Whether a program could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return False
    return True


def client_host(host: str) -> str:
    """The address a client on this machine uses for a server that listens on `host`."""
    wildcard = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104
    address = wildcard.get(host, host)
    return f"[{address}]" if ":" in address else address
