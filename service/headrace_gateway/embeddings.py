"""Answers a request for embeddings: each input is a request of its own in the model's queue.

Only some of them wait in the queue at a time, so that one client's thousand inputs neither fill it
nor stand before everybody else's. All end when the client goes.
"""

import asyncio
import base64
import json
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from headrace_common.errors import FailureCode, QueueFull, RequestFailed
from headrace_common.messages import GenerateRequest
from headrace_common.pooling import MAX_EMBEDDING_SIZE

from .admission import Accepted, Admission, Job, cancel_all
from .chat_messages import Body
from .drain import Drain
from .observation import Observation
from .run import Piece, Usage
from .schemas import MAX_CACHE_SALT_CHARS
from .sse import Writer
from .watched import Delivery, WatchedResponse, stop

Encoding = Literal["float", "base64"]

IN_FLIGHT = 64
LONGEST_PAUSE_S = 1.0
# Floats as text take about half a microsecond each: more than these are written in a thread.
INLINE_FLOATS = 16_384


class EmbeddingRequest(Body):
    """OpenAI's fields, then ours. `input` is text, token ids, or a list of either."""

    model: StrictStr | None = None
    input: Any
    encoding_format: Encoding = "float"
    dimensions: StrictInt | None = Field(None, ge=1, le=MAX_EMBEDDING_SIZE)
    user: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    add_special_tokens: StrictBool = True
    priority: StrictInt = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: StrictStr | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingExchange:
    """All that one answer is made from. `headers` are those of the response."""

    admission: Admission
    job: Job
    requests: Sequence[GenerateRequest]
    encoding: Encoding
    observation: Observation
    headers: Mapping[str, str]


class EmbeddingResponse(WatchedResponse):
    """The vectors of a request's inputs, each a request in the queue."""

    def __init__(self, exchange: EmbeddingExchange, delivery: Delivery, drain: Drain) -> None:
        super().__init__(exchange.observation, delivery, drain)
        self._exchange = exchange
        self._total = Usage()
        self._accepted: list[Accepted] = []
        self._places = asyncio.Semaphore(IN_FLIGHT)

    def _usage(self) -> Usage:
        return self._total

    async def _leave(self, *, complete: bool) -> None:
        await cancel_all(self._accepted)

    async def _answer(self, writer: Writer) -> str | None:
        tasks = [asyncio.create_task(self._embed(one)) for one in self._exchange.requests]
        try:
            vectors = await asyncio.gather(*tasks)
        finally:
            await stop(*tasks)
        content = await self._content(vectors)
        await writer.whole(200, content, self._exchange.headers)
        return None

    async def _embed(self, request: GenerateRequest) -> bytes:
        async with self._places:
            accepted = await self._submit(request)
            async for delta in accepted.generation:
                if delta.embedding is not None:
                    self._count(request, delta.cached_tokens)
                    return delta.embedding
        raise RequestFailed(
            FailureCode.INTERNAL, "the model's engine is of a version that makes no embeddings"
        )

    def _count(self, request: GenerateRequest, cached_tokens: int) -> None:
        self._total.prompt_tokens += len(request.prompt_token_ids)
        self._total.cached_tokens += cached_tokens
        self._exchange.observation.piece(
            Piece(choice=0, text="", token_ids=(), logprobs=None, finish_reason="stop")
        )

    async def _submit(self, request: GenerateRequest) -> Accepted:
        """Once one of them is in the queue, the others wait until there is room for them."""
        exchange = self._exchange
        while True:
            try:
                (accepted,) = await exchange.admission.submit(exchange.job, [request])
            except QueueFull as error:
                if not self._accepted or time.time() * 1000 > request.deadline_ms:
                    raise
                await asyncio.sleep(min(error.retry_after, LONGEST_PAUSE_S))
            else:
                self._accepted.append(accepted)
                exchange.observation.admitted(1)
                return accepted

    async def _content(self, vectors: Sequence[bytes]) -> bytes:
        encoding, model = self._exchange.encoding, self._exchange.job.model.name
        floats = sum(map(len, vectors)) // 4
        if encoding == "base64" or floats <= INLINE_FLOATS:
            return embeddings_body(vectors, model, self._total.prompt_tokens, encoding)
        return await asyncio.to_thread(
            embeddings_body, vectors, model, self._total.prompt_tokens, encoding
        )


def embeddings_body(vectors: Sequence[bytes], model: str, tokens: int, encoding: Encoding) -> bytes:
    """The body of an answer. Vectors are little-endian float32, which base64 hands on as it is."""
    write = _as_base64 if encoding == "base64" else _as_numbers
    items = ",".join(
        f'{{"object":"embedding","index":{index},"embedding":{write(vector)}}}'
        for index, vector in enumerate(vectors)
    )
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    tail = json.dumps({"model": model, "usage": usage}, separators=(",", ":"))
    return f'{{"object":"list","data":[{items}],{tail[1:]}'.encode()


def _as_base64(vector: bytes) -> str:
    return f'"{base64.b64encode(vector).decode()}"'


def _as_numbers(vector: bytes) -> str:
    """Nine digits, from which every float32 is read back as it was."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return f"[{','.join([f'{number:.9g}' for number in numbers])}]"
