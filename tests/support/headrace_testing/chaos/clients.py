"""Clients that each retry until they have their answer, and compare it with the expected one.

A `plain` client streams and has one connection. A `resumable` one reconnects to its stream with its
key. A `whole` one asks for an answer without a stream, and asks again with its key. All ask again
after 429 and 503.
"""

import asyncio
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import httpx

from .cases import Case, Expected

_PAUSE_S = 0.1
_LIMIT_S = 90.0


class ClientKind(Enum):
    PLAIN = "plain"
    RESUMABLE = "resumable"
    WHOLE = "whole"


@dataclass(slots=True)
class Choice:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: int = 0

    def take(self, content: Mapping[str, Any]) -> None:
        self.token_ids += content.get("token_ids") or []
        self.text += content.get("text") or ""
        self.finish_reason = content.get("finish_reason") or self.finish_reason
        self.logprobs += len((content.get("logprobs") or {}).get("token_logprobs") or ())


@dataclass(slots=True)
class Answer:
    """What a client has received so far.

    `refused` counts answers with 429 or 503, `reconnects` connections after a broken stream.
    """

    choices: dict[int, Choice] = field(default_factory=dict)
    completion_tokens: int | None = None
    error: str | None = None
    done: bool = False
    refused: int = 0
    reconnects: int = 0
    last_id: str | None = None
    request_id: str = ""

    def take(self, content: Mapping[str, Any]) -> int:
        """Adds one event, or a whole answer; returns the number of its tokens."""
        if "error" in content:
            self.error = json.dumps(content["error"])
        self.request_id = content.get("id", "").removeprefix("cmpl-") or self.request_id
        if content.get("usage"):
            self.completion_tokens = content["usage"]["completion_tokens"]
        tokens = 0
        for choice in content.get("choices") or ():
            self.choices.setdefault(choice["index"], Choice()).take(choice)
            tokens += len(choice.get("token_ids") or ())
        return tokens


class Client:
    """One request at one of several gateways. `seen` is called with each event's new tokens."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        urls: Sequence[str],
        case: Case,
        kind: ClientKind,
        seen: Callable[[int], None],
    ) -> None:
        self._http = http
        self._urls = urls
        self.kind = kind
        self._seen = seen
        self._headers: dict[str, str] = {}
        self._body = case.body
        if kind is not ClientKind.WHOLE:
            self._body |= {"stream": True, "stream_options": {"include_usage": True}}
        if kind is not ClientKind.PLAIN:
            self._headers["idempotency-key"] = str(uuid.uuid4())
        self.case = case
        self.answer = Answer()

    async def run(self) -> Answer:
        answer = self.answer
        try:
            async with asyncio.timeout(_LIMIT_S):
                while not answer.done and answer.error is None:
                    await self._try_once()
        except TimeoutError:
            answer.error = f"no end within {_LIMIT_S:.0f} s"
        return answer

    async def _try_once(self) -> None:
        url = self._urls[self.answer.reconnects % len(self._urls)] + "/v1/completions"
        headers = dict(self._headers)
        if self.answer.last_id is not None:
            headers["last-event-id"] = self.answer.last_id
        refused, how = False, "it ended without [DONE]"
        try:
            async with self._http.stream("POST", url, json=self._body, headers=headers) as reply:
                refused = reply.status_code in (429, 503)
                await self._read(reply, refused=refused)
        except httpx.TransportError as error:
            how = repr(error)
        if not self.answer.done and self.answer.error is None:
            await self._before_retry(None if refused else how)

    async def _read(self, reply: httpx.Response, *, refused: bool) -> None:
        if refused:
            self.answer.refused += 1
            assert "retry-after" in reply.headers, reply.headers
        elif reply.status_code != 200:
            self.answer.error = f"{reply.status_code} {(await reply.aread()).decode()}"
        elif self.kind is ClientKind.WHOLE:
            self._seen(self.answer.take(json.loads(await reply.aread())))
            self.answer.done = True
        else:
            await self._read_events(reply)

    async def _read_events(self, reply: httpx.Response) -> None:
        rest = b""
        async for piece in reply.aiter_raw():
            *blocks, rest = (rest + piece).split(b"\n\n")
            for block in blocks:
                self._take_event(block)

    def _take_event(self, block: bytes) -> None:
        for line in block.split(b"\n"):
            name, _, value = line.partition(b": ")
            if name == b"id":
                self.answer.last_id = value.decode()
            elif name == b"data" and value == b"[DONE]":
                self.answer.done = True
            elif name == b"data":
                self._seen(self.answer.take(json.loads(value)))

    async def _before_retry(self, broke: str | None) -> None:
        """Waits before the next try. `broke` says how the connection ended; None: a refusal."""
        if broke is not None:
            self.answer.reconnects += 1
            if self.kind is ClientKind.PLAIN:
                self.answer.error = f"the stream broke: {broke}"
                return
        await asyncio.sleep(_PAUSE_S)


def problem(case: Case, answer: Answer) -> str | None:
    """Returns the error in an answer, or None."""
    if answer.error is not None:
        return answer.error
    if set(answer.choices) != set(range(len(case.expected))):
        return f"choices {sorted(answer.choices)} of {len(case.expected)}"
    if answer.completion_tokens != case.tokens:
        return f"usage says {answer.completion_tokens} of {case.tokens} tokens"
    for index, expected in enumerate(case.expected):
        if found := _difference(expected, answer.choices[index], "logprobs" in case.fields):
            return f"choice {index}: {found}"
    return None


def _difference(expected: Expected, received: Choice, logprobs: bool) -> str | None:
    wanted = expected.token_ids
    if tuple(received.token_ids) != wanted:
        pairs = zip(received.token_ids, wanted, strict=False)
        right = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), "all")
        return f"{len(received.token_ids)} of {len(wanted)} tokens, right up to {right}"
    if received.text != expected.text:
        return f"text {received.text!r} instead of {expected.text!r}"
    if received.finish_reason != expected.finish_reason:
        return f"ended with {received.finish_reason} instead of {expected.finish_reason}"
    if received.logprobs != (len(wanted) if logprobs else 0):
        return f"{received.logprobs} log probabilities of {len(wanted)} tokens"
    return None
