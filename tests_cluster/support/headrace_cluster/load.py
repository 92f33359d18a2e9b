"""Clients that stream through the ingress with the openai SDK and check every token."""

import asyncio
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from types import TracebackType
from typing import Self

import httpx
from openai import APIConnectionError, APIStatusError, AsyncOpenAI
from openai.types import CompletionChoice

from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import until

REQUEST_TIMEOUT_S = 240.0
# Of one request, where its connection breaks or nobody answers.
ATTEMPTS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One request of the load. Times are Unix seconds; `problem` is None where it was right.

    `attempts` counts the connections that it took.
    """

    begun: float
    ended: float
    attempts: int
    problem: str | None


@dataclass(slots=True)
class Load:
    """`clients` requests in flight until the block ends or `requests` were sent; all are awaited.

    Each has an Idempotency-Key. Where its connection breaks, as proxies' connections do, or the
    server says so (503), it is asked again with the same key: that is the same request, read anew.
    Without `stream` the engines are what is busiest on a small machine, and not the clients.
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
        """Until every request that was sent is answered."""
        assert self._thread is not None
        self._thread.join()

    def await_answers(self, more: int) -> None:
        """Until so many more requests have been answered, right or wrong."""
        wanted = len(self.answered) + more
        until(lambda: len(self.answered) >= wanted, f"{wanted} answers", REQUEST_TIMEOUT_S)

    def mistakes(self) -> list[str]:
        return [one.problem for one in self.answered if one.problem is not None]

    def in_flight(self) -> int:
        return self._sent - len(self.answered)

    async def _run(self) -> None:
        client = AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S
        )
        cases = cycle(self.cases)
        async with client:
            await asyncio.gather(*(self._client(client, cases) for _ in range(self.clients)))

    async def _client(self, client: AsyncOpenAI, cases: "cycle[GreedyCase]") -> None:
        while not self._stop.is_set() and (self.requests is None or self._sent < self.requests):
            self._sent += 1
            begun = time.time()
            attempts, problem = await self._insist(client, next(cases))
            self.answered.append(
                Answered(begun=begun, ended=time.time(), attempts=attempts, problem=problem)
            )

    async def _insist(self, client: AsyncOpenAI, case: GreedyCase) -> tuple[int, str | None]:
        """The attempts that it took, and what is wrong with the answer."""
        key = str(uuid.uuid4())
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return attempt, await self._ask(client, case, key)
            except (APIConnectionError, APIStatusError, httpx.TransportError) as error:
                refused = isinstance(error, APIStatusError) and not _passing(error)
                if refused or attempt == ATTEMPTS:
                    return attempt, f"{type(error).__name__}: {error}"
                await asyncio.sleep(min(2.0, 0.1 * attempt))
        raise AssertionError("unreachable")

    async def _ask(self, client: AsyncOpenAI, case: GreedyCase, key: str) -> str | None:
        create = client.completions.create
        prompt, headers = list(case.prompt), {"Idempotency-Key": key}
        body = {
            "max_tokens": len(case.output),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if not self.stream:
            whole = await create(
                model=self.model, prompt=prompt, extra_body=body, extra_headers=headers
            )
            return _problem(case, whole.choices)
        stream = await create(
            model=self.model, prompt=prompt, stream=True, extra_body=body, extra_headers=headers
        )
        return _problem(case, [choice async for chunk in stream for choice in chunk.choices])


def _passing(error: APIStatusError) -> bool:
    """Overload, or no gateway behind the ingress, which some tell as 404 without a JSON body."""
    return error.status_code in (429, 502, 503, 504) or (
        error.status_code == 404 and not isinstance(error.body, dict)
    )


def _problem(case: GreedyCase, pieces: Sequence[CompletionChoice]) -> str | None:
    """What is wrong with an answer, whole or in pieces."""
    got = tuple(token for piece in pieces for token in getattr(piece, "token_ids", None) or ())
    reason = next((piece.finish_reason for piece in pieces if piece.finish_reason), None)
    if got != case.output:
        same = next(
            (i for i, (a, b) in enumerate(zip(got, case.output, strict=False)) if a != b),
            min(len(got), len(case.output)),
        )
        return f"{len(got)} of {len(case.output)} tokens, right up to {same}"
    return None if reason == "length" else f"ended with {reason}"
