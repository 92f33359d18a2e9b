"""Large bodies that arrive at once leave the event loop to others."""

import asyncio

from starlette.types import Message, Receive, Scope, Send

from headrace_gateway.http.body import CHUNKS_A_TURN, LARGE_BYTES, BodyLimit

CHUNK = bytes(64 * 1024)
BODIES, CHUNKS = 16, 32


async def test_large_bodies_are_read_in_turns() -> None:
    read: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        read.append(len((await receive())["body"]))

    limit = BodyLimit(app, max_bytes=2**30, max_upload_bytes=2**30, timeout=60)

    async def post() -> None:
        left = CHUNKS

        async def receive() -> Message:
            nonlocal left
            left -= 1
            return {"type": "http.request", "body": CHUNK, "more_body": left > 0}

        async def send(_: Message) -> None:
            raise AssertionError("the body must not be refused")

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await limit(scope, receive, send)

    turns = 0
    posts = [asyncio.create_task(post()) for _ in range(BODIES)]
    while not all(task.done() for task in posts):
        await asyncio.sleep(0)
        turns += 1

    await asyncio.gather(*posts)
    assert read == [CHUNKS * len(CHUNK)] * BODIES
    assert turns >= BODIES * (CHUNKS - LARGE_BYTES // len(CHUNK) - 1) // CHUNKS_A_TURN
