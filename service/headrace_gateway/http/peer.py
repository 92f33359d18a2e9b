"""The client's end of a connection, as the kernel knows it.

Without this module the server notices that a client has left only when it reads the connection
again, some turns of the event loop later. Until then it would begin work that no client waits for.
"""

import asyncio
import socket

# The states of a connection that was reset, and of one whose client sends nothing more (Linux's
# net/tcp_states.h).
_CLOSED, _CLOSE_WAIT = 7, 8
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)


class Peer:
    """The client's end of a connection. `descriptor` is None if the socket is not plain TCP."""

    __slots__ = ("descriptor",)

    def __init__(self, transport: asyncio.Transport) -> None:
        self.descriptor = _descriptor(transport)

    @property
    def has_reset(self) -> bool:
        """Whether the client has reset the connection; False if that is not known."""
        return self._state() == _CLOSED

    @property
    def has_left(self) -> bool:
        """Whether the client has reset or closed the connection; False if that is not known."""
        return self._state() in (_CLOSED, _CLOSE_WAIT)

    def _state(self) -> int | None:
        if self.descriptor is None or _TCP_INFO is None:
            return None
        try:
            connected = socket.socket(
                socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=self.descriptor
            )
            try:
                return connected.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0]
            finally:
                connected.detach()
        except OSError:
            return None


def _descriptor(transport: asyncio.Transport) -> int | None:
    """Returns the file descriptor of a transport's socket; None if it is not plain TCP."""
    connected = transport.get_extra_info("socket")
    if connected is None or transport.get_extra_info("sslcontext") is not None:
        return None
    return int(connected.fileno())
