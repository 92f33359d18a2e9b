"""Packets between a gateway and the process that started the engines on its machine.

They go over a pair of sockets of type SOCK_SEQPACKET that no other process has. The gateway asks
for an engine to be killed; the answer has the same number.
"""

import json
import socket
from dataclasses import asdict, dataclass

from ..errors import MessageError

MAX_BYTES = 2048


@dataclass(frozen=True, slots=True)
class KillRequest:
    """Asks to kill the engine with this id."""

    number: int
    engine_id: str


@dataclass(frozen=True, slots=True)
class KillAnswer:
    """The name of the engine that was killed; None if it is not one of this machine's."""

    number: int
    killed: str | None


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that do not block."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for one in pair:
        one.setblocking(False)
    return pair


def encode(packet: KillRequest | KillAnswer) -> bytes:
    return json.dumps(asdict(packet)).encode()


def decode_request(data: bytes) -> KillRequest:
    """Raises MessageError."""
    number, engine_id = _fields(data, "engine_id")
    if not isinstance(engine_id, str):
        raise MessageError("kill request: engine_id must be a string")
    return KillRequest(number, engine_id)


def decode_answer(data: bytes) -> KillAnswer:
    """Raises MessageError."""
    number, killed = _fields(data, "killed")
    if killed is not None and not isinstance(killed, str):
        raise MessageError("kill answer: killed must be a string or null")
    return KillAnswer(number, killed)


def _fields(data: bytes, name: str) -> tuple[int, object]:
    try:
        body = json.loads(data)
        number, value = body["number"], body[name]
    except (ValueError, TypeError, KeyError) as error:
        raise MessageError(f"packet of the supervisor's socket unreadable: {error}") from error
    if not isinstance(number, int):
        raise MessageError("packet of the supervisor's socket: number must be an integer")
    return number, value
