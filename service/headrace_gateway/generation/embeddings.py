"""Answers a request for embeddings: each input is a request of its own in the model's queue."""

import asyncio
import base64
import json
import sys
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, StrictBool, StrictInt

from headrace_common.errors import HeadraceError
from headrace_common.protocol.store import StoredRequest
from headrace_common.sampling.pooling import MAX_EMBEDDING_SIZE
from headrace_common.wire.messages import GenerateRequest

from ..limits.fields import FreeObject, Items, Name, Text
from ..queue_client.drain import Drain
from ..queue_client.ports import Generation
from ..queue_client.run import Piece, Usage
from ..resumable.embedding_batch import EmbeddingBatch
from ..resumable.embedding_sessions import EmbeddingSession
from ..schemas.chat_messages import Body, Message
from ..schemas.completions import MAX_CACHE_SALT_CHARS, MAX_MESSAGES
from ..streaming.disconnecting_response import Delivery, DisconnectingResponse
from ..streaming.sse import Writer
from ..telemetry.observation import Observation
from .admission import Admission, Job

Encoding = Literal["float", "base64"]

# Writing a float as text takes about half a microsecond: more than these are written in a thread.
INLINE_FLOATS = 16_384
# Base64 is faster to write than text, but there may be megabytes of it.
INLINE_ENCODED_FLOATS = 2**18
# Ends the form of answers with a vector for each token.
_OF_TOKENS = "_of_tokens"
# The piece that is recorded in metrics for a vector, which has no tokens.
ONE_MADE = Piece(choice=0, text="", token_ids=(), logprobs=None, finish_reason="stop")


class EmbeddingRequest(Body):
    """OpenAI's fields, then ours. `input` is text, token ids, or a list of either. vLLM's
    `messages` are one input through the chat template, which may have images."""

    model: Name | None = None
    input: Any = None
    encoding_format: Encoding = "float"
    dimensions: StrictInt | None = Field(None, ge=1, le=MAX_EMBEDDING_SIZE)
    user: Name | None = None
    safety_identifier: Name | None = None
    messages: Items[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool = False
    continue_final_message: StrictBool = False
    chat_template_kwargs: FreeObject | None = None
    priority: StrictInt = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: Text | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingExchange:
    """The data from which one answer is made. `headers` are those of the response.

    `write` makes its body from the vectors of all inputs and the number of their tokens.
    """

    admission: Admission
    job: Job
    requests: Sequence[GenerateRequest]
    write: Callable[[Sequence[bytes], int], Awaitable[bytes]]
    observation: Observation
    headers: Mapping[str, str]


class EmbeddingResponse(DisconnectingResponse):
    """Answers with the vectors of a request's inputs, which all end when the client leaves."""

    def __init__(self, exchange: EmbeddingExchange, delivery: Delivery, drain: Drain) -> None:
        super().__init__(exchange.observation, delivery, drain)
        self._exchange = exchange
        self._total = Usage()
        self._batch = EmbeddingBatch(
            exchange.requests, self._submit, self._made, {}, exchange.admission.clock
        )

    def _usage(self) -> Usage:
        return self._total

    async def begin(self) -> None:
        """Queues the first input. Raises the error of a refusal."""
        try:
            await self._batch.begin()
        except HeadraceError as error:
            self._exchange.observation.rejected(error)
            raise

    async def _leave(self, *, complete: bool) -> None:
        await self._batch.cancel()

    async def _answer(self, writer: Writer) -> str | None:
        vectors = await self._batch.all()
        exchange = self._exchange
        content = await exchange.write(vectors, self._total.prompt_tokens)
        await writer.whole(200, content, exchange.headers)
        return None

    async def _submit(self, request: GenerateRequest) -> Generation:
        (accepted,) = await self._exchange.admission.submit(self._exchange.job, [request])
        self._exchange.observation.admitted(1, low_priority=request.priority > 0)
        return accepted.generation

    def _made(self, request: GenerateRequest, cached_tokens: int) -> None:
        self._total.prompt_tokens += len(request.prompt_token_ids)
        self._total.cached_tokens += cached_tokens
        self._exchange.observation.piece(ONE_MADE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumableEmbeddingExchange:
    """The data from which the answer of a stored request is made.

    `admits` says that this response queued the request and counts it.
    """

    session: EmbeddingSession
    observation: Observation
    headers: Mapping[str, str]
    admits: bool


class ResumableEmbeddingResponse(DisconnectingResponse):
    """Answers with the vectors of a request that continues without this response."""

    def __init__(
        self, exchange: ResumableEmbeddingExchange, delivery: Delivery, drain: Drain
    ) -> None:
        super().__init__(exchange.observation, delivery, drain)
        self._exchange = exchange
        self._session = exchange.session
        self._total = Usage()

    def _usage(self) -> Usage:
        return self._total

    async def begin(self) -> None:
        """Joins the session; returns once an input is queued. Raises the error of a refusal."""
        self._session.presence.join()
        try:
            await self._session.begun()
        except BaseException as error:
            self._session.presence.leave()
            if isinstance(error, HeadraceError):
                self._exchange.observation.rejected(error)
            raise

    async def _leave(self, *, complete: bool) -> None:
        self._session.presence.leave()

    async def _answer(self, writer: Writer) -> str | None:
        stored = self._session.stored
        vectors = await self._session.result()
        if self._exchange.admits:
            self._count()
        await writer.whole(200, await stored_content(stored, vectors), self._exchange.headers)
        return None

    def _count(self) -> None:
        self._total.prompt_tokens = prompt_tokens(self._session.stored)
        self._total.cached_tokens = self._session.cached_tokens
        for _ in self._session.stored.requests:
            self._exchange.observation.piece(ONE_MADE)


def prompt_tokens(stored: StoredRequest) -> int:
    return sum(len(request.prompt_token_ids) for request in stored.requests)


async def stored_content(stored: StoredRequest, vectors: Sequence[bytes]) -> bytes:
    """Returns the body of a stored request's answer: the same bytes each time."""
    counts = [len(request.prompt_token_ids) for request in stored.requests]
    return await content_of(vectors, counts, stored.model, stored.form)


def of_tokens(encoding: Encoding) -> str:
    """Returns the form of answers that have a vector for each token."""
    return encoding + _OF_TOKENS


async def content_of(
    vectors: Sequence[bytes], counts: Sequence[int], model: str, form: str
) -> bytes:
    """Returns the body of an answer; a large one is made in a thread. See embeddings_body."""
    floats = sum(map(len, vectors)) // 4
    if floats <= INLINE_FLOATS or (form.startswith("base64") and floats <= INLINE_ENCODED_FLOATS):
        return embeddings_body(vectors, counts, model, form)
    return await asyncio.to_thread(embeddings_body, vectors, counts, model, form)


def embeddings_body(
    vectors: Sequence[bytes], counts: Sequence[int], model: str, form: str
) -> bytes:
    """Returns the body of an answer. `counts` are the tokens of each input, `form` is an encoding,
    or what `of_tokens` makes of it.

    Vectors are little-endian float32, as base64 carries them; those of an input's tokens are one
    after the other.
    """
    if form.startswith("base64"):
        written = map(_as_base64, vectors)
    elif form.endswith(_OF_TOKENS):
        written = map(_as_rows, vectors, counts)
    else:
        written = map(_as_numbers, vectors)
    items = ",".join(
        f'{{"object":"embedding","index":{index},"embedding":{each}}}'
        for index, each in enumerate(written)
    )
    tokens = sum(counts)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    tail = json.dumps({"model": model, "usage": usage}, separators=(",", ":"))
    return f'{{"object":"list","data":[{items}],{tail[1:]}'.encode()


def _as_rows(vectors: bytes, count: int) -> str:
    """Writes `count` vectors of the same length."""
    size = len(vectors) // count
    rows = (vectors[at : at + size] for at in range(0, count * size, size))
    return f"[{','.join(map(_as_numbers, rows))}]"


def _as_base64(vector: bytes) -> str:
    return f'"{base64.b64encode(vector).decode()}"'


def _as_numbers(vector: bytes) -> str:
    """Writes nine digits of each number, from which every float32 is read back unchanged."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return f"[{','.join([f'{number:.9g}' for number in numbers])}]"
