"""Streams of answers whose text and pauses are recorded."""

import asyncio
import hashlib
import time
from dataclasses import dataclass
from typing import Protocol

import httpx

from ..chat.deltas import deltas
from ..errors import ChatError, CliError

MAX_TOKENS = 240
_NO_TIMEOUT = httpx.Timeout(None, connect=10.0)


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. `longest_pause`: seconds between two of its pieces."""

    question: str
    text: str
    seconds: float
    longest_pause: float

    @property
    def size(self) -> int:
        """The size in bytes."""
        return len(self.text.encode())

    @property
    def digest(self) -> str:
        """The beginning of the SHA-256 of the answer's bytes."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


class Listener(Protocol):
    """Gets the pieces of the streams, each with the number of its question."""

    def begun(self, number: int, request_id: str) -> None: ...

    def piece(self, number: int, text: str) -> None: ...


class Deaf:
    """A listener that does nothing."""

    def begun(self, number: int, request_id: str) -> None: ...

    def piece(self, number: int, text: str) -> None: ...


async def ask_all(
    url: str, model: str, questions: tuple[str, ...], listener: Listener
) -> list[Answer]:
    """Streams all answers at once."""
    async with httpx.AsyncClient(base_url=url, timeout=_NO_TIMEOUT, trust_env=False) as http:
        streams = [
            _ask(http, model, number, question, listener)
            for number, question in enumerate(questions)
        ]
        return list(await asyncio.gather(*streams))


async def _ask(
    http: httpx.AsyncClient,
    model: str,
    number: int,
    question: str,
    listener: Listener,
) -> Answer:
    """Raises CliError if the stream breaks; it is not retried."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "temperature": 0.7,
        "seed": number,
    }
    pieces: list[str] = []
    started = last = time.monotonic()
    pause = 0.0
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                raise CliError(f"HTTP {response.status_code}: {text[:500]}")
            listener.begun(number, response.headers["x-request-id"])
            async for delta in deltas(response.aiter_lines()):
                now = time.monotonic()
                pause, last = max(pause, now - last), now
                if delta.content:
                    pieces.append(delta.content)
                    listener.piece(number, delta.content)
    except (httpx.TransportError, ChatError) as error:
        raise CliError(
            f"a stream broke after {len(pieces)} pieces: {error or type(error).__name__}"
        ) from error
    return Answer(question, "".join(pieces), time.monotonic() - started, pause)
