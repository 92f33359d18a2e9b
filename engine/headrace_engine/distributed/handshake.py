"""How a node greets node 0: JSON in frames, with a proof on both sides that the secret is known.

A connection is closed unless the whole greeting arrives in time. Nothing that it sends is unpickled
or otherwise executed. Afterwards the same socket is a Connection, whose frames have the same form.
"""

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError

PROTOCOL = "headrace-nodes-1"
# Seconds for the whole greeting.
TIMEOUT = 10.0
# The largest frame of a greeting.
MAX_BYTES = 2**16
# The sides of a proof, which differ so that a proof cannot be sent back.
_NODE_0, _OTHER = "node 0", "another node"

Fields = Mapping[str, Any]


class HandshakeFailed(Exception):
    """The other side is no node of this engine, or does not know the secret."""


class WrongSecret(HandshakeFailed):
    """The other side speaks the protocol, but its proof is wrong."""


def read_secret(file: str | None) -> bytes:
    """The nodes' secret; empty without a file. Raises ConfigError."""
    if file is None:
        return b""
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"node_secret_file: {file} cannot be read: {error}") from error
    if not secret:
        raise ConfigError(f"node_secret_file: {file} is empty: write a long random text into it")
    return secret


class Greeting:
    """One greeting over a connected socket, by either side. `timeout` bounds all of it."""

    def __init__(self, sock: socket.socket, secret: bytes, timeout: float = TIMEOUT) -> None:
        self._sock, self._secret = sock, secret
        self._deadline = time.monotonic() + timeout

    def introduce(self, content: Fields) -> Fields:
        """Sends what node 0 wants to know; returns its reply. Raises HandshakeFailed, OSError."""
        nonce = secrets.token_hex(32)
        self.send({"protocol": PROTOCOL, "nonce": nonce})
        challenge = self._receive()
        nonces = (nonce, _text(challenge, "nonce"))
        self._check(challenge, _NODE_0, *nonces)
        body = json.dumps(content)
        self.send({"content": body, "proof": self._proof(_OTHER, *nonces, body)})
        return self._receive()

    def introduction(self) -> Fields:
        """Receives what `introduce` sends, which `send` answers. Raises HandshakeFailed,
        OSError."""
        first = self._receive()
        if first.get("protocol") != PROTOCOL:
            raise HandshakeFailed(f"it does not speak {PROTOCOL}")
        nonces = (_text(first, "nonce"), secrets.token_hex(32))
        self.send({"nonce": nonces[1], "proof": self._proof(_NODE_0, *nonces)})
        message = self._receive()
        body = _text(message, "content")
        self._check(message, _OTHER, *nonces, body)
        return _object(body.encode())

    def send(self, content: Fields) -> None:
        """Sends one frame. Raises OSError."""
        data = json.dumps(content).encode()
        self._sock.settimeout(self._left())
        self._sock.sendall(struct.pack("!i", len(data)) + data)

    def finish(self, lost_after: float) -> Connection:
        """Turns the socket into a Connection without a time limit. Reading from it fails once its
        host has given no sign of life for `lost_after` seconds."""
        _watch_host(self._sock, lost_after)
        self._sock.settimeout(None)
        return Connection(self._sock.detach())

    def _receive(self) -> Fields:
        (size,) = struct.unpack("!i", self._read(4))
        if not 0 < size <= MAX_BYTES:
            raise HandshakeFailed("it does not send frames of a greeting")
        return _object(self._read(size))

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            self._sock.settimeout(self._left())
            part = self._sock.recv(count - len(data))
            if not part:
                raise HandshakeFailed("it closed the connection")
            data += part
        return data

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the greeting took too long")
        return left

    def _proof(self, *parts: str) -> str:
        return hmac.new(self._secret, json.dumps(parts).encode(), "sha256").hexdigest()

    def _check(self, message: Fields, *parts: str) -> None:
        if not hmac.compare_digest(_text(message, "proof").encode(), self._proof(*parts).encode()):
            raise WrongSecret("its node_secret_file has another content")


def _object(data: bytes) -> Fields:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise HandshakeFailed("it does not send JSON") from error
    if not isinstance(content, dict):
        raise HandshakeFailed("it does not send JSON objects")
    return content


def _text(message: Fields, name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str):
        raise HandshakeFailed(f"its greeting has no {name}")
    return value


def _watch_host(sock: socket.socket, seconds: float) -> None:
    """Makes the kernel probe an idle connection, and give up after `seconds`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe = max(1, int(seconds / 3))
    options = {
        "TCP_KEEPIDLE": probe,
        "TCP_KEEPINTVL": probe,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": int(seconds * 1000),
    }
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
