"""An attack and its answer; an attack writes HTTP as bytes over its own sockets."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from .limits import ANSWER_LIMIT_S
from .world import Target

Client = Literal["stranger", "tenant", "neighbour"]
# Later answers are not waited for.
PATIENCE_S = ANSWER_LIMIT_S + 2
# The bytes of an answer and the seconds that are read before the connection is reset.
ANSWER_BYTES, ANSWER_READ_S = 64 * 1024, 0.3
DEADLINE_S = 8  # the timeout in the requests


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an attack.

    `outcome` is a status, `closed`, or `none` if neither came in time.
    """

    outcome: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack.

    `spoils` says that the processes must be restarted after it, because Redis is full. `refused`
    says that its answer must be a 4xx.
    """

    name: str
    client: Client
    play: Callable[[Target], Awaitable[Answer]] = field(repr=False)
    spoils: bool = False
    refused: bool = False


def head(
    path: str, key: str | None, headers: Mapping[str, str] | None = None, method: str = "POST"
) -> bytes:
    """The first lines of a request, without the empty line that ends them."""
    given = {"Host": "x", "Connection": "close", "x-request-timeout": str(DEADLINE_S)}
    if key is not None:
        given["Authorization"] = f"Bearer {key}"
    if method == "POST":
        given["Content-Type"] = "application/json"
    given.update(headers or {})
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in given.items())]
    return "".join(f"{line}\r\n" for line in lines).encode("utf-8", "surrogateescape")


def post(
    path: str, content: bytes, key: str | None, headers: Mapping[str, str] | None = None
) -> bytes:
    """A complete request."""
    return head(path, key, headers) + b"Content-Length: %d\r\n\r\n" % len(content) + content


async def exchange(port: int, pieces: Iterable[bytes], pause: float = 0.0) -> Answer:
    """Sends pieces until an answer begins, reads part of the answer, and resets the connection."""
    began = time.monotonic()
    outcome = "none"
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            outcome = await _exchange(port, pieces, pause)
    return Answer(outcome, time.monotonic() - began)


async def _exchange(port: int, pieces: Iterable[bytes], pause: float) -> str:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return "closed"
    sending = asyncio.create_task(_send(writer, pieces, pause))
    try:
        line = await reader.readline()
        if not line:
            return "closed"
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_READ_S):
                await reader.readexactly(ANSWER_BYTES)
        return _status(line)
    except asyncio.IncompleteReadError:
        return _status(line)
    except (OSError, ValueError):
        return "closed"
    finally:
        sending.cancel()
        writer.transport.abort()


def _status(line: bytes) -> str:
    words = line.split()
    return words[1].decode() if len(words) > 1 and words[0].startswith(b"HTTP/") else "closed"


async def _send(writer: asyncio.StreamWriter, pieces: Iterable[bytes], pause: float) -> None:
    with suppress(OSError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            if pause:
                await asyncio.sleep(pause)


async def together(answers: Iterable[Awaitable[Answer]]) -> Answer:
    """Waits for all answers; returns the worst outcome and the longest time."""
    found = await asyncio.gather(*answers)
    worst = min(found, key=lambda answer: _goodness(answer.outcome))
    return Answer(worst.outcome, max(answer.seconds for answer in found))


# From the worst on; all others are refusals.
_OUTCOMES = ("none", "500", "200")


def _goodness(outcome: str) -> int:
    return _OUTCOMES.index(outcome) if outcome in _OUTCOMES else len(_OUTCOMES)
