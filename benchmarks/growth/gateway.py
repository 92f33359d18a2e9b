"""Curves of one gateway: CPU for a streamed token and memory, over open streams."""

import json
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import psutil

from path import PATHS, body, requests, running_bench, saturated, streaming
from queue_path.processes import Server

from .curve import Curve, up_to

RATE = 2000.0
MEMORY_LIMIT_MB = 500.0
CONNECTIONS = {"MAX_CONNECTIONS": "15000", "MAX_OPEN_REQUESTS_PER_TENANT": "11000"}


def tokens(most: int, seconds: float) -> Iterator[Curve]:
    """CPU of the gateway for a token, over streams that get 2,000 tokens a second together, and at
    full speed."""
    calm = Curve("gateway, 2,000 tokens/s", "streams", "gateway, a token", "µs")
    full = Curve("gateway, full speed", "streams", "gateway, a token", "µs")
    size = Curve("client's bytes", "streams", "received, a token", "bytes")
    for count in up_to(most, [1, 16, 256, 1024, 4096]):
        with running_bench(more=CONNECTIONS) as bench:
            calm_cost = streaming(bench, count, min(RATE, 200.0 * count), seconds)
            full_cost = saturated(bench, "completions", count, max(40, min(2000, 40_000 // count)))
        for curve, cost in ((calm, calm_cost), (full, full_cost)):
            if cost["missed_tokens"] or cost["incomplete_streams"]:
                raise RuntimeError(f"{count} streams lost tokens: {cost}")
            curve.add(count, cost["gateway_us_per_token"])
        size.add(count, calm_cost["bytes_per_token"])
    yield from (calm, full, size)


def answers(most: int, _seconds: float) -> Iterator[Curve]:
    """CPU of the gateway for a request with one output token, over requests at once."""
    curve = Curve("gateway, by requests at once", "requests at once", "gateway, a request", "µs")
    with running_bench(more=CONNECTIONS) as bench:
        for count in up_to(most, [1, 8, 64, 512]):
            cost = requests(bench, max(400, 2 * count), count)
            curve.add(count, cost["gateway_us_per_request"])
    yield curve


def idle(most: int, seconds: float) -> Iterator[Curve]:
    """Memory and CPU of a gateway whose streams wait for their first token."""
    memory = Curve("gateway's memory", "idle streams", "resident", "MB", MEMORY_LIMIT_MB)
    cpu = Curve("gateway, idle", "idle streams", "CPU a second", "ms")
    with running_bench(more=CONNECTIONS) as bench, ExitStack() as stack:
        there = 0
        for count in up_to(most, [1, 100, 1000, 4000, 10_000]):
            for client in _open(bench.gateway, count - there):
                stack.callback(client.close)
            there = count
            time.sleep(1.0)
            begun = bench.gateway.cpu_seconds()
            time.sleep(seconds)
            used = bench.gateway.cpu_seconds() - begun
            resident = psutil.Process(bench.gateway.pid).memory_info().rss
            memory.add(count, resident / 1e6)
            cpu.add(count, 1e3 * used / seconds)
    yield from (memory, cpu)


def _open(gateway: Server, count: int) -> list[socket.socket]:
    """Opens streams, a hundred at a time, and returns when all have their response's head."""
    parts = urlsplit(gateway.url)
    content = json.dumps(body("completions", 64)).encode()
    head = f"POST {PATHS['completions']} HTTP/1.1\r\nhost: {parts.netloc}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    clients: list[socket.socket] = []
    while len(clients) < count:
        batch = [
            socket.create_connection((str(parts.hostname), parts.port or 80))
            for _ in range(min(100, count - len(clients)))
        ]
        for client in batch:
            client.sendall(head.encode() + content)
        _await_heads(batch)
        clients += batch
    return clients


def _await_heads(clients: list[socket.socket]) -> None:
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(60.0)
            if not ready:
                raise RuntimeError("the gateway did not answer for a minute")
            for key, _ in ready:
                answered = key.fileobj
                assert isinstance(answered, socket.socket)
                status = answered.recv(65536).split(b" ", 2)[1]
                if status != b"200":
                    raise RuntimeError(f"a stream was refused with {status.decode()}")
                selector.unregister(answered)
