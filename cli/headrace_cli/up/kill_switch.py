"""Kills engines when a gateway of this `up` asks for it, so that users can watch the recovery.

Each gateway has one end of a pair of sockets; restarted gateways get the same one again.
"""

import asyncio
import socket
from collections.abc import Sequence

from headrace_common.config.supervisor_socket import (
    MAX_BYTES,
    KillAnswer,
    KillRequest,
    decode_request,
    encode,
    socket_pair,
)
from headrace_common.errors import MessageError

from ..processes.report import Report
from ..processes.supervisor import Service


class KillSwitch:
    """Kills `engines` on request; `serve` answers until it is cancelled."""

    def __init__(self, gateways: int, engines: Sequence[Service], report: Report) -> None:
        self._engines = engines
        self._report = report
        self._pairs = [socket_pair() for _ in range(gateways)]

    @property
    def fds(self) -> list[int]:
        """The gateways' ends of the socket pairs."""
        return [theirs.fileno() for _, theirs in self._pairs]

    async def serve(self) -> None:
        await asyncio.gather(*(self._answer(own) for own, _ in self._pairs))

    def close(self) -> None:
        for pair in self._pairs:
            for one in pair:
                one.close()

    async def _answer(self, own: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(own, MAX_BYTES):
            try:
                request = decode_request(data)
            except MessageError as error:
                self._report.event(str(error))
                continue
            await loop.sock_sendall(own, encode(KillAnswer(request.number, self._kill(request))))

    def _kill(self, request: KillRequest) -> str | None:
        """Kills an engine. Its id begins with host and process id, which no other `up` uses."""
        host = socket.gethostname()
        for engine in self._engines:
            if engine.pid is not None and request.engine_id.startswith(f"{host}.{engine.pid}."):
                self._report.event(f"killing {engine.spec.name}: the console asked for it")
                engine.crash()
                return engine.spec.name
        return None
