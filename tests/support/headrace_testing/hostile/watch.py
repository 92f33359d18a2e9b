"""Watches the processes under attack from a process of its own, which the attacks do not slow.

Samples their memory, asks for their health, and plays the other tenant: it streams without a pause
and sends light requests. Kills a process that takes more memory than its limit, as in a pod.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from headrace_testing.stack import MODEL

from .limits import PROBE_INTERVAL_S, PROBE_LIMIT_S
from .world import Target, Watched

SAMPLE_S = 0.02
LIGHT_S = 0.05
# Between two streams, because the engine needs a whole processor while one runs.
PAUSE_S = 0.15
CHILDREN_EVERY = 10
PAGE = os.sysconf("SC_PAGE_SIZE")
STREAMED = 24
# Longer than anything may take, so that each wait has an end.
PATIENCE_S = 30.0

Kind = Literal[
    "memory", "killed", "ran", "waited", "probe", "ready", "light", "gap", "first", "error", "lag"
]


@dataclass(frozen=True, slots=True)
class Event:
    """`began` is the monotonic time of its start, and `seconds` its duration. The meaning of
    `value` depends on the kind: bytes, nanoseconds for which a process has run or waited for a
    processor, or whether something succeeded."""

    kind: Kind
    name: str
    began: float
    seconds: float = 0.0
    value: int = 1


Tell = Callable[[Event], None]


class Watch:
    """The events so far."""

    def __init__(self, receiver: Connection) -> None:
        self._events: list[Event] = []
        self._thread = threading.Thread(target=self._receive, args=(receiver,), daemon=True)
        self._thread.start()

    def _receive(self, receiver: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._events.append(receiver.recv())

    def since(self, began: float) -> list[Event]:
        """Everything that ended after `began`."""
        found: list[Event] = []
        for event in reversed(self._events[:]):
            if event.began + event.seconds < began - 2 * PATIENCE_S:
                break
            if event.began + event.seconds >= began:
                found.append(event)
        return found[::-1]

    def all(self) -> list[Event]:
        return self._events[:]

    def settled(self, after: float, timeout_s: float = PATIENCE_S) -> bool:
        """Waits until a light request that began after `after` has been answered, a stream has
        continued since, and memory has been sampled."""
        limit = time.monotonic() + timeout_s
        while time.monotonic() < limit:
            recent = [event for event in self._events[-200:] if event.began > after]
            kinds = {event.kind for event in recent if event.value}
            if {"light", "gap", "memory"} <= kinds:
                return True
            time.sleep(0.01)
        return False


@contextmanager
def watching(target: Target, watched: Sequence[Watched]) -> Iterator[Watch]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_observe, args=(sender, target, tuple(watched)), daemon=True)
    process.start()
    sender.close()
    try:
        yield Watch(receiver)
    finally:
        process.kill()
        process.join()


def _observe(sender: Connection, target: Target, watched: Sequence[Watched]) -> None:
    """The main function of the watching process."""
    lock = threading.Lock()

    def tell(event: Event) -> None:
        with lock:
            sender.send(event)

    threading.Thread(target=_sample, args=(watched, tell), daemon=True).start()
    asyncio.run(_ask(target, tell))


async def _ask(target: Target, tell: Tell) -> None:
    probes = [
        ("gateway", target.gateway_metrics),
        ("gateway api", target.api),
        ("engine", target.engine_metrics),
    ]
    async with asyncio.TaskGroup() as tasks:
        for name, port in probes:
            for path in ("live", "ready"):
                tasks.create_task(_probe(name, port, path, tell))
        tasks.create_task(_light(target, tell))
        tasks.create_task(_stream(target, tell))
        tasks.create_task(_lag(tell))


# Memory


def _sample(watched: Sequence[Watched], tell: Tell) -> None:
    trees = {each.pid: [each.pid] for each in watched}
    waits = {each.pid: _Waits(each.pid) for each in watched}
    turn = 0
    while True:
        for each in watched:
            if turn % CHILDREN_EVERY == 0:
                trees[each.pid] = _family(each.pid)
                for child in trees[each.pid][1:]:
                    _, waited = _processor(f"/proc/{child}")
                    tell(Event("waited", f"{each.name} {child}", time.monotonic(), value=waited))
            found = memory(trees[each.pid], precise_above=each.limit // 3)
            tell(Event("memory", each.name, time.monotonic(), value=found))
            ran, _ = _processor(f"/proc/{each.pid}")
            tell(Event("ran", each.name, time.monotonic(), value=ran))
            waited = waits[each.pid].sample()
            tell(Event("waited", each.name, time.monotonic(), value=waited))
            if found > each.limit:
                with suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
                tell(Event("killed", each.name, time.monotonic()))
        turn += 1
        time.sleep(SAMPLE_S)


def _family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            for children in Path(f"/proc/{each}/task").glob("*/children"):
                found += [int(child) for child in children.read_text().split()]
    return found


def memory(pids: Sequence[int], precise_above: int) -> int:
    """The memory that processes use together, in bytes.

    Shared memory counts once if there is much of it.
    """
    own, shared = 0, 0
    for pid in pids:
        with suppress(OSError):
            _, resident, common, *_ = Path(f"/proc/{pid}/statm").read_text().split()
            own += (int(resident) - int(common)) * PAGE
            shared = max(shared, int(common) * PAGE)
    if len(pids) == 1 or own + shared < precise_above:
        return own + shared
    return sum(map(_proportional, pids))


def _processor(path: str) -> tuple[int, int]:
    """Nanoseconds for which a thread has run, and has waited for a processor. `/proc/PID` is the
    main thread."""
    with suppress(OSError):
        ran, waited, _ = Path(f"{path}/schedstat").read_text().split()
        return int(ran), int(waited)
    return 0, 0


class _Waits:
    """How long a process has waited for a processor.

    A thread that waits with the GIL delays all others, so of each sample the longest wait of one
    thread counts.
    """

    def __init__(self, pid: int) -> None:
        self._threads = Path(f"/proc/{pid}/task")
        self._last: dict[str, int] = {}
        self._total = 0

    def sample(self) -> int:
        """Nanoseconds in all."""
        found: dict[str, int] = {}
        with suppress(OSError):
            found = {
                name: _processor(f"{self._threads}/{name}")[1] for name in os.listdir(self._threads)
            }
        waits = (waited - self._last.get(name, waited) for name, waited in found.items())
        self._total += max(waits, default=0)
        self._last = found
        return self._total


def _proportional(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


# The prober, and the other tenant


async def _lag(tell: Tell) -> None:
    """The delay of this process itself."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(SAMPLE_S)
        late = time.monotonic() - began - SAMPLE_S
        if late > SAMPLE_S:
            tell(Event("lag", "watch", began, late))


async def _probe(name: str, port: int, path: str, tell: Tell) -> None:
    kind: Kind = "probe" if path == "live" else "ready"
    while True:
        began = time.monotonic()
        status = 0
        with suppress(OSError, TimeoutError, ValueError, EOFError):
            async with asyncio.timeout(PROBE_LIMIT_S):
                status = await _get(port, f"/health/{path}")
        took = time.monotonic() - began
        tell(Event(kind, name, began, took, int(status == 200)))
        await asyncio.sleep(max(0.0, PROBE_INTERVAL_S - took))


async def _get(port: int, path: str, headers: str = "") -> int:
    """The status of an answer on a new connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}Connection: close\r\n\r\n".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.read(-1)
        return int(head.split()[1])
    finally:
        writer.close()


async def _light(target: Target, tell: Tell) -> None:
    headers = f"Authorization: Bearer {target.bystander}\r\n"
    while True:
        began = time.monotonic()
        status = 0
        with suppress(OSError, TimeoutError, ValueError, EOFError):
            async with asyncio.timeout(PATIENCE_S):
                status = await _get(target.api, "/v1/models", headers)
        tell(Event("light", "models", began, time.monotonic() - began, int(status == 200)))
        await asyncio.sleep(LIGHT_S)


async def _stream(target: Target, tell: Tell) -> None:
    while True:
        began = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await _stream_once(target, tell)
        except (OSError, TimeoutError, ValueError, EOFError) as error:
            tell(Event("error", f"{type(error).__name__} {error}"[:200], began, _since(began), 0))
        await asyncio.sleep(PAUSE_S)


async def _stream_once(target: Target, tell: Tell) -> None:
    """Runs one short chat. Raises ValueError if it is not answered completely."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", target.api)
    try:
        writer.write(_chat(target.bystander))
        head = await reader.readuntil(b"\r\n\r\n")
        if (status := head.partition(b"\r\n")[0]).split()[1] != b"200":
            raise ValueError(f"the other tenant got {status!r}")
        last, seen = began, 0
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if not line:
                raise ValueError("the other tenant's stream broke off")
            if line.startswith(b"data: {"):
                if b'"error"' in line:
                    raise ValueError(f"the other tenant got {line[:150]!r}")
                tell(Event("gap" if seen else "first", "stream", last, _since(last)))
                last, seen = time.monotonic(), seen + 1
    finally:
        writer.close()


def _since(began: float) -> float:
    return time.monotonic() - began


def _chat(key: str) -> bytes:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me of the mill."}],
        "max_tokens": STREAMED,
        "stream": True,
        "ignore_eos": True,
    }
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + content
