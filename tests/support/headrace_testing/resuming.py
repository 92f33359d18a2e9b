"""Clients that continue a resumable stream at another gateway when their connection breaks."""

import asyncio
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

Event = Mapping[str, Any]
# Paths, and the bodies to send to them.
Bodies = Sequence[tuple[str, Mapping[str, Any]]]


@dataclass(slots=True)
class ReceivedStream:
    """The part of a stream that a client has received: its events, the last id, whether it ended.

    `returned` counts how often the client has come back.
    """

    events: list[Event] = field(default_factory=list)
    last_id: str | None = None
    done: bool = False
    returned: int = 0

    @property
    def request_id(self) -> str:
        assert self.last_id is not None, "no event has come"
        return self.last_id.partition(":")[0]

    def take(self, block: str) -> None:
        """Takes one event as it came, without the empty line after it."""
        for line in block.split("\n"):
            name, _, value = line.partition(": ")
            if name == "id":
                self.last_id = value
            elif name == "data" and value == "[DONE]":
                self.done = True
            elif name == "data":
                self.events.append(content(json.loads(value)))


def content(body: Mapping[str, Any]) -> Event:
    """The content of an event, without the fields that differ between two requests."""
    event = {name: value for name, value in body.items() if name not in ("id", "created")}
    if event.get("usage"):
        # the cache is warm from here on
        event["usage"] = {**event["usage"], "prompt_tokens_details": None}
    return event


async def read(
    answer: httpx.Response, into: ReceivedStream, seen: Callable[[ReceivedStream], None]
) -> None:
    """Reads a stream until it ends or breaks; `seen` is called after each event."""
    assert answer.status_code == 200, await answer.aread()
    text = ""
    async for piece in answer.aiter_text():
        text += piece
        *blocks, text = text.split("\n\n")
        for block in blocks:
            into.take(block)
            seen(into)


class Returning:
    """A client that knows several gateways. After each break it continues at the next one."""

    def __init__(
        self, client: httpx.AsyncClient, urls: Sequence[str], seen: Callable[[ReceivedStream], None]
    ) -> None:
        self._client = client
        self._urls = urls
        self._seen = seen

    async def stream(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> ReceivedStream:
        received = ReceivedStream()
        request = {"method": "POST", "url": self._urls[0] + path, "json": body, "headers": headers}
        while not received.done:
            try:
                async with self._client.stream(**request) as answer:  # type: ignore[arg-type]
                    await read(answer, received, self._seen)
            except httpx.TransportError:
                pass
            if received.done:
                break
            received.returned += 1
            assert received.returned < 20, "the stream breaks again and again"
            url = self._urls[received.returned % len(self._urls)]
            if received.last_id is None:
                request["url"] = url + path
                continue
            request = {
                "method": "GET",
                "url": f"{url}/v1/requests/{received.request_id}/events",
                "headers": {"last-event-id": received.last_id},
            }
        return received


async def stream_all(
    urls: Sequence[str], wanted: Bodies, disturb: Callable[[], None] | None = None
) -> list[ReceivedStream]:
    """Reads all streams at once; calls `disturb` in a thread when all have begun."""
    begun: set[int] = set()
    enough = asyncio.Event()

    def seen(stream: ReceivedStream) -> None:
        begun.add(id(stream))
        if len(begun) == len(wanted):
            enough.set()

    limits = httpx.Limits(max_connections=len(wanted))
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        streams = [
            asyncio.create_task(
                Returning(client, urls, seen).stream(
                    path, body, {"idempotency-key": str(uuid.uuid4())}
                )
            )
            for path, body in wanted
        ]
        if disturb is not None:
            await enough.wait()
            await asyncio.to_thread(disturb)
        return await asyncio.gather(*streams)


def by_choice(received: ReceivedStream) -> list[list[Mapping[str, Any]]]:
    """A stream's events choice by choice: their order between choices is free."""
    events: dict[int, list[Mapping[str, Any]]] = {}
    for event in received.events:
        assert "error" not in event, event
        number = event["choices"][0]["index"] if event["choices"] else -1
        events.setdefault(number, []).append(event)
    return [events[number] for number in sorted(events)]
