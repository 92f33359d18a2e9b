"""Asks the process that started this machine's engines to kill one; `headrace up` is one."""

import asyncio
import socket

from headrace_common.config.supervisor_socket import (
    MAX_BYTES,
    KillRequest,
    decode_answer,
    encode,
)

from ..errors import unavailable

TIMEOUT_S = 5.0


class EngineSupervisor:
    """The supervisor at the other end of a socket. Use from one event loop."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = asyncio.Lock()
        self._number = 0

    @classmethod
    def at(cls, fd: int) -> "EngineSupervisor":
        """The supervisor at the other end of an inherited socket. Raises OSError."""
        end = socket.socket(fileno=fd)
        end.setblocking(False)
        return cls(end)

    async def kill(self, engine_id: str) -> str | None:
        """Kills an engine; returns its name, or None if it is not the supervisor's. Raises
        ApiError."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            self._number += 1
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await loop.sock_sendall(self._end, encode(KillRequest(self._number, engine_id)))
                    while True:
                        answer = decode_answer(await loop.sock_recv(self._end, MAX_BYTES))
                        # the answer to a request of an earlier process
                        if answer.number == self._number:
                            return answer.killed
            except TimeoutError as error:
                raise unavailable(
                    "The process that runs the engines does not answer.", code="supervisor_silent"
                ) from error

    def close(self) -> None:
        self._end.close()
