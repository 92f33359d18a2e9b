"""Clients that stream through the ingress with the openai SDK and check every token."""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from types import TracebackType
from typing import Self

from openai import AsyncOpenAI, OpenAIError

from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import until

REQUEST_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One request of the load. Times are Unix seconds; `problem` is None where it was right."""

    begun: float
    ended: float
    problem: str | None


@dataclass(slots=True)
class Load:
    """`clients` requests in flight until the block ends or `requests` were sent; all are awaited.

    `retries` is the SDK's own max_retries: 0 makes every failure visible. A stream that breaks is
    a failure with any number.
    """

    url: str
    model: str
    cases: Sequence[GreedyCase]
    clients: int
    requests: int | None = None
    retries: int = 0
    answered: list[Answered] = field(default_factory=list)
    stream: bool = True
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
            assert self.answered
            assert self.mistakes() == []

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
        base = f"{self.url}/v1"
        client = AsyncOpenAI(
            base_url=base, api_key="none", max_retries=self.retries, timeout=REQUEST_TIMEOUT_S
        )
        cases = cycle(self.cases)
        async with client:
            await asyncio.gather(*(self._client(client, cases) for _ in range(self.clients)))

    async def _client(self, client: AsyncOpenAI, cases: "cycle[GreedyCase]") -> None:
        while not self._stop.is_set() and (self.requests is None or self._sent < self.requests):
            self._sent += 1
            case = next(cases)
            begun = time.time()
            try:
                problem = await self._ask(client, case)
            except OpenAIError as error:
                problem = f"{type(error).__name__}: {error}"
            self.answered.append(Answered(begun=begun, ended=time.time(), problem=problem))

    async def _ask(self, client: AsyncOpenAI, case: GreedyCase) -> str | None:
        """What is wrong with the answer."""
        got: list[int] = []
        reason: str | None = None
        fields = {"ignore_eos": True, "return_token_ids": True}
        options = {"max_tokens": len(case.output), "temperature": 0.0}
        if not self.stream:
            whole = await client.completions.create(
                model=self.model, prompt=list(case.prompt), extra_body=fields,
                max_tokens=len(case.output), temperature=0,
            )  # fmt: skip
            got += getattr(whole.choices[0], "token_ids", None) or []
            return _problem(case, got, whole.choices[0].finish_reason)
        stream = await client.completions.create(
            model=self.model, prompt=list(case.prompt), stream=True, extra_body=fields | options
        )
        async for chunk in stream:
            for choice in chunk.choices:
                got += getattr(choice, "token_ids", None) or []
                reason = choice.finish_reason or reason
        return _problem(case, got, reason)


def _problem(case: GreedyCase, got: Sequence[int], reason: str | None) -> str | None:
    if tuple(got) != case.output:
        same = next(
            (i for i, (a, b) in enumerate(zip(got, case.output, strict=False)) if a != b),
            min(len(got), len(case.output)),
        )
        return f"{len(got)} of {len(case.output)} tokens, right up to {same}"
    return None if reason == "length" else f"ended with {reason}"
