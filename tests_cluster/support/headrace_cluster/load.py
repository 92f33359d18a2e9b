"""Clients that stream through the ingress and check every token.

They read events with httpx only. The openai SDK needs several times as long for each event. On few
cores, such a client falls behind and reads one stream after the other, so that each seems to pause
for seconds.
"""

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from types import TracebackType
from typing import Any, Self

import httpx

from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import until

from .processors import Span

Choice = dict[str, Any]

REQUEST_TIMEOUT_S = 240.0
# Shorter times between two tokens do not count as pauses.
PAUSE_S = 0.5
# Attempts of one request whose connection breaks or that gets no answer.
ATTEMPTS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One request of the load.

    Times are Unix seconds; `problem` is None if the answer was right. `attempts` counts its
    connections; `pauses` are the times between two of its tokens.
    """

    begun: float
    ended: float
    attempts: int
    problem: str | None
    pauses: Sequence[Span]


@dataclass(slots=True)
class Progress:
    """The progress of one request's stream over all its connections."""

    tokens: int = 0
    pauses: list[Span] = field(default_factory=list)
    _at: float = 0.0

    def reached(self, tokens: int) -> None:
        if tokens <= self.tokens:
            return  # read once more after a connection broke
        now = time.time()
        if self.tokens and now - self._at >= PAUSE_S:
            self.pauses.append(Span(self._at, now))
        self.tokens, self._at = tokens, now


@dataclass(slots=True)
class Load:
    """`clients` requests in flight until the block ends or `requests` were sent; all are awaited.

    Each has an Idempotency-Key. If its connection breaks, as proxies' connections do, or if the
    server answers 503, the client sends it again with the same key, which reads the same request
    again. Without `stream` the engines, not the clients, use most of a small machine.
    """

    url: str
    model: str
    cases: Sequence[GreedyCase]
    clients: int
    requests: int | None = None
    stream: bool = True
    answered: list[Answered] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _sent: int = 0
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self.join()
        if error is None:
            mistakes = self.mistakes()
            assert self.answered, "nothing was asked"
            assert not mistakes, f"{len(mistakes)} of {len(self.answered)} wrong: {mistakes[:10]}"

    def join(self) -> None:
        """Waits until every sent request is answered."""
        assert self._thread is not None
        self._thread.join()

    def await_answers(self, more: int) -> None:
        """Waits until `more` further requests have been answered, right or wrong."""
        wanted = len(self.answered) + more
        until(lambda: len(self.answered) >= wanted, f"{wanted} answers", REQUEST_TIMEOUT_S)

    def mistakes(self) -> list[str]:
        return [one.problem for one in self.answered if one.problem is not None]

    @property
    def pauses(self) -> list[Span]:
        """The pauses of all streams, the longest first."""
        found = (pause for one in self.answered for pause in one.pauses)
        return sorted(found, key=lambda pause: pause.seconds, reverse=True)

    def in_flight(self) -> int:
        return self._sent - len(self.answered)

    async def _run(self) -> None:
        cases = cycle(self.cases)
        async with httpx.AsyncClient(base_url=self.url, timeout=REQUEST_TIMEOUT_S) as client:
            await asyncio.gather(*(self._client(client, cases) for _ in range(self.clients)))

    async def _client(self, client: httpx.AsyncClient, cases: "cycle[GreedyCase]") -> None:
        while not self._stop.is_set() and (self.requests is None or self._sent < self.requests):
            self._sent += 1
            begun = time.time()
            progress = Progress()
            attempts, problem = await self._insist(client, next(cases), progress)
            self.answered.append(
                Answered(
                    begun=begun,
                    ended=time.time(),
                    attempts=attempts,
                    problem=problem,
                    pauses=progress.pauses,
                )
            )

    async def _insist(
        self, client: httpx.AsyncClient, case: GreedyCase, progress: Progress
    ) -> tuple[int, str | None]:
        """Sends a request until it is answered; returns the number of attempts and what is wrong
        with the answer."""
        key = str(uuid.uuid4())
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return attempt, await self._ask(client, case, key, progress)
            except (httpx.HTTPStatusError, httpx.TransportError) as error:
                refused = isinstance(error, httpx.HTTPStatusError) and not _passing(error.response)
                if refused or attempt == ATTEMPTS:
                    return attempt, _words(error)
                await asyncio.sleep(min(2.0, 0.1 * attempt))
        raise AssertionError("unreachable")

    async def _ask(
        self, client: httpx.AsyncClient, case: GreedyCase, key: str, progress: Progress
    ) -> str | None:
        body = {
            "model": self.model,
            "prompt": list(case.prompt),
            "stream": self.stream,
            "max_tokens": len(case.output),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {"Idempotency-Key": key}
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            if not answer.is_success or not self.stream:
                await answer.aread()
                return _problem(case, answer.raise_for_status().json()["choices"])
            pieces: list[Choice] = []
            tokens = 0
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return f"an error in the stream: {event['error']}"
                pieces += event["choices"]
                tokens += sum(len(_tokens(choice)) for choice in event["choices"])
                progress.reached(tokens)
            return _problem(case, pieces)


def _tokens(piece: Choice) -> Sequence[int]:
    return piece.get("token_ids") or ()


def _words(error: httpx.HTTPError) -> str:
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, httpx.HTTPStatusError):
        words += f" {error.response.text[:500]}"
    return words


def _passing(answer: httpx.Response) -> bool:
    """Whether asking again can help: overload, or no gateway behind the ingress.

    Some ingresses answer the latter with 404 without JSON.
    """
    if answer.headers.get("x-should-retry") == "false":
        return False
    if answer.status_code == 404:
        return not answer.headers.get("content-type", "").startswith("application/json")
    return answer.status_code in (429, 502, 503, 504)


def _problem(case: GreedyCase, pieces: Sequence[Choice]) -> str | None:
    """Returns the error in an answer, whole or in pieces."""
    got = tuple(token for piece in pieces for token in _tokens(piece))
    reason = next((piece["finish_reason"] for piece in pieces if piece.get("finish_reason")), None)
    if got != case.output:
        same = next(
            (i for i, (a, b) in enumerate(zip(got, case.output, strict=False)) if a != b),
            min(len(got), len(case.output)),
        )
        return f"{len(got)} of {len(case.output)} tokens, right up to {same}"
    return None if reason == "length" else f"ended with {reason}"
