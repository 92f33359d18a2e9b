"""Many streaming clients at once, with what each of them received."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from .greedy import GreedyCase
from .stack import MODEL


@dataclass(slots=True)
class Received:
    """The events that one client received."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    completion_tokens: int | None = None
    error: str | None = None


class Crowd:
    """Streaming completions, one for each case, spread over gateways; `received` grows
    meanwhile."""

    def __init__(
        self, urls: Sequence[str], cases: Sequence[GreedyCase], model: str = MODEL
    ) -> None:
        self._urls = urls
        self._model = model
        self._cases = cases
        self.received = [Received() for _ in cases]

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=len(self._cases))
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            await asyncio.gather(
                *(self._stream(client, number) for number in range(len(self._cases)))
            )

    async def _stream(self, client: httpx.AsyncClient, number: int) -> None:
        case, received = self._cases[number], self.received[number]
        body = {
            "model": self._model,
            "prompt": list(case.prompt),
            "max_tokens": len(case.output),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        url = f"{self._urls[number % len(self._urls)]}/v1/completions"
        async with client.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                received.error = (await answer.aread()).decode()
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _take(received, json.loads(line[6:]))

    def mistakes(self) -> list[str]:
        """A line for each stream that differs from its undisturbed run."""
        return [
            f"stream {number}: {problem}"
            for number, (case, got) in enumerate(zip(self._cases, self.received, strict=True))
            if (problem := _problem(case, got)) is not None
        ]


def _take(received: Received, event: dict[str, object]) -> None:
    if "error" in event:
        received.error = str(event["error"])
    choices = event.get("choices")
    if isinstance(choices, list) and choices:
        received.token_ids += choices[0].get("token_ids") or []
        received.finish_reason = choices[0].get("finish_reason") or received.finish_reason
    usage = event.get("usage")
    if isinstance(usage, dict):
        received.completion_tokens = usage["completion_tokens"]


def _problem(case: GreedyCase, got: Received) -> str | None:
    if got.error is not None:
        return f"error {got.error}"
    if tuple(got.token_ids) != case.output:
        same = 0
        for ours, theirs in zip(got.token_ids, case.output, strict=False):
            if ours != theirs:
                break
            same += 1
        return f"{len(got.token_ids)} of {len(case.output)} tokens, right up to {same}"
    if got.finish_reason != "length" or got.completion_tokens != len(case.output):
        return f"ended with {got.finish_reason}, usage {got.completion_tokens}"
    return None
