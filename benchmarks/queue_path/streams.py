"""Clients that read event streams as raw bytes, so that they cost little beside the gateway.

Every read is timed, with the tokens that it completes: each is a letter of its event's text.
"""

import json
import re
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

_TEXT = re.compile(rb'"(?:text|content)":"(a+)"')
_PIECE = 65536
_END = b"data: [DONE]\n\n"
_ID = re.compile(rb'"id":"(?:cmpl|chatcmpl)-([^"]+)"')


@dataclass(slots=True)
class Stream:
    """The events that one client received.

    Times are monotonic ns; `arrivals[i]` is that of token i.
    """

    sent: int = 0
    status: int = 0
    request_id: str = ""
    arrivals: list[int] = field(default_factory=list)
    reads: int = 0
    received: int = 0  # bytes, with the response's head
    events: int = 0
    complete: bool = False


class Started:
    """Calls `then` when `streams` streams have received their first event."""

    def __init__(self, streams: int, then: Callable[[], None]) -> None:
        self._left = streams
        self._then = then

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._then()


class _Client:
    """One request on its own connection.

    It only records what arrives when, and parses it at the end, so that the reads of others are not
    delayed.
    """

    def __init__(self, address: tuple[str, int], request: bytes) -> None:
        self.stream = Stream()
        self.started = False
        self._reads: list[tuple[int, bytes]] = []
        self.socket = socket.create_connection(address)
        self.stream.sent = time.monotonic_ns()
        self.socket.sendall(request)
        self.socket.setblocking(False)

    def read(self) -> bool:
        """Reads available data; returns False at the end of the connection."""
        data = self.socket.recv(_PIECE)
        self._reads.append((time.monotonic_ns(), data))
        if not self.started:
            self.started = bool(_TEXT.search(b"".join(data for _, data in self._reads)))
        return bool(data)

    def end(self) -> Stream:
        self.socket.close()
        read_events(self.stream, self._reads)
        return self.stream


def read_events(stream: Stream, reads: Sequence[tuple[int, bytes]]) -> None:
    """Fills a stream's record from the data and their times."""
    tail = b""
    for now, data in reads:
        events, end, tail = (tail + data).rpartition(b"\n\n")
        stream.arrivals += [now] * sum(map(len, _TEXT.findall(events)))
        stream.events += events.count(b"data: {")
        stream.complete = stream.complete or _END in events + end
    stream.reads = len(reads)
    whole = b"".join(data for _, data in reads)
    stream.received = len(whole)
    if whole:
        stream.status = int(whole.split(b" ", 2)[1])
    if found := _ID.search(whole):
        stream.request_id = found[1].decode()


def read_streams(
    url: str,
    path: str,
    bodies: Sequence[dict[str, Any]],
    concurrency: int,
    started: Callable[[], None] = lambda: None,
) -> list[Stream]:
    """Sends `bodies`, `concurrency` at a time.

    `started` is called at the first event of each stream.
    """
    parts = urlsplit(url)
    address = (str(parts.hostname), parts.port or 80)
    left = map(partial(_request, path, parts.netloc), bodies)
    done: list[Stream] = []
    with selectors.DefaultSelector() as selector:

        def begin() -> None:
            for request in islice(left, 1):
                client = _Client(address, request)
                selector.register(client.socket, selectors.EVENT_READ, client)

        for _ in range(concurrency):
            begin()
        while selector.get_map():
            for key, _ in selector.select():
                client, had_started = key.data, key.data.started
                goes_on = client.read()
                if client.started and not had_started:
                    started()
                if not goes_on:
                    selector.unregister(client.socket)
                    done.append(client.end())
                    begin()
    return done


def _request(path: str, host: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    ).encode() + content
