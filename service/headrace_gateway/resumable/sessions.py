"""Requests that outlive their HTTP connections: each runs here once, for any number of readers.

A reader gets every token from the first one, one by one, whenever it joins. A request without a
reader for its window, here or at another gateway, is cancelled.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace

from headrace_common.errors import FailureCode, HeadraceError, RequestFailed
from headrace_common.protocol.store import RequestStore, StoredRequest
from headrace_common.sampling.params import SamplingParams
from headrace_common.text.detokenizer import ChoiceText
from headrace_common.text.tokenizer import Tokenizer
from headrace_common.wire.messages import GenerateRequest

from ..limits.tenant_stores import token_bytes
from ..queue_client.generation import Delta
from ..queue_client.ports import Client, Generation
from ..queue_client.ports import Delta as AnyDelta
from ..queue_client.run import Accepted
from .presence import ClientPresence

logger = logging.getLogger(__name__)

Settle = Callable[[StoredRequest, int], Awaitable[None]]


def sampling_of(stored: StoredRequest) -> SamplingParams:
    """Returns the sampling that readers need: with stop strings, which the queue's request
    lacks."""
    return replace(stored.requests[0].sampling, stop=stored.stop)


class DeltaLog:
    """The deltas of one request, each of one token, which can be read from the beginning."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._failure: HeadraceError | None = None
        self._ended = False
        self._changed = asyncio.Event()

    @property
    def tokens(self) -> int:
        """The number of tokens so far."""
        return sum(len(delta.token_ids) for delta in self._deltas)

    def add(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._notify()

    def end(self, failure: HeadraceError | None = None) -> None:
        self._ended, self._failure = True, failure
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def read(self) -> AsyncIterator[Delta]:
        """Yields all deltas until the end.

        Raises the error of a request that ended without an answer.
        """
        position = 0
        while True:
            changed = self._changed
            while position < len(self._deltas):
                yield self._deltas[position]
                position += 1
                if position % 64 == 0:
                    await asyncio.sleep(0)  # a long answer must not delay other streams
            if position == len(self._deltas) and self._ended:
                if self._failure is not None:
                    raise self._failure
                return
            if position == len(self._deltas):
                await changed.wait()


def single_tokens(delta: AnyDelta) -> Iterator[Delta]:
    """Splits a delta into single tokens: events must not depend on how engines group tokens."""
    count = len(delta.token_ids)
    for index in range(max(1, count)):
        last = index >= count - 1
        yield Delta(
            choice=delta.choice,
            token_ids=tuple(delta.token_ids[index : index + 1]),
            logprobs=None if delta.logprobs is None else tuple(delta.logprobs[index : index + 1]),
            finish_reason=delta.finish_reason if last else None,
            stop_token=delta.stop_token if last else None,
            cached_tokens=delta.cached_tokens,
        )


class _Stops:
    """Finds the stop strings of a request even if it has no reader."""

    def __init__(self, request: GenerateRequest, sampling: SamplingParams, tok: Tokenizer) -> None:
        prompt = request.prompt_token_ids
        self._open = {
            choice: ChoiceText(tok, prompt, sampling)
            for choice in (range(sampling.n) if sampling.stop else ())
        }
        self._tokens: Counter[int] = Counter()

    def found(self, delta: Delta) -> int | None:
        """The number of the choice's tokens if its text ends at this delta, else None."""
        text = self._open.get(delta.choice)
        if text is None or delta.finish_reason is not None:
            return None
        self._tokens[delta.choice] += len(delta.token_ids)
        if text.push(delta.token_ids).stop is None:
            return None
        del self._open[delta.choice]
        return self._tokens[delta.choice]


class FollowedRequest:
    """One request of the queue within a session: follows its generation to the end."""

    def __init__(
        self, request: GenerateRequest, generation: Generation, sampling: SamplingParams
    ) -> None:
        self.request = request
        self.sampling = sampling
        self._generation = generation
        self.log = DeltaLog()

    async def follow(self, tokenizer: Tokenizer) -> None:
        stops = _Stops(self.request, self.sampling, tokenizer)
        failure: HeadraceError | None = RequestFailed(FailureCode.INTERNAL, "the gateway failed")
        try:
            async for delta in self._generation:
                for single in single_tokens(delta):
                    self.log.add(single)
                    if (tokens := stops.found(single)) is not None:
                        await self._generation.stop_choice(single.choice, tokens)
            failure = None
        except HeadraceError as error:
            failure = error
        finally:
            self.log.end(failure)

    @property
    def output_bytes(self) -> int:
        """The size of its output in the store."""
        return self.log.tokens * token_bytes(self.sampling.logprobs)

    async def cancel(self) -> None:
        await self._generation.cancel()

    def leave(self) -> None:
        self._generation.leave()


class Session:
    """A stored request that runs here. `on_end` is called once, when it has ended."""

    def __init__(
        self,
        stored: StoredRequest,
        followed: list[FollowedRequest],
        store: RequestStore,
        settle: Settle,
        on_end: Callable[["Session"], None],
    ) -> None:
        self.stored = stored
        self._presence = ClientPresence(stored, store)
        self._followed = followed
        self._settle = settle
        self._on_end = on_end
        self._tasks: list[asyncio.Task[None]] = []
        self._cancelling: asyncio.Task[None] | None = None

    def start(self, tokenizer: Tokenizer) -> None:
        follow = asyncio.create_task(self._follow(tokenizer), name="session")
        self._tasks.append(follow)
        follow.add_done_callback(self._end)
        if not self.stored.background:
            self._tasks.append(asyncio.create_task(self._guard(), name="guard"))

    async def _follow(self, tokenizer: Tokenizer) -> None:
        await asyncio.gather(*(one.follow(tokenizer) for one in self._followed))
        await self._settle(self.stored, sum(one.output_bytes for one in self._followed))

    def _end(self, follow: "asyncio.Task[None]") -> None:
        self.close()
        self._on_end(self)
        if not follow.cancelled() and (error := follow.exception()) is not None:
            logger.critical(
                "the session of a stored request failed", extra=self._fields, exc_info=error
            )

    def close(self) -> None:
        """Stops following and ends nothing; a cancellation that has begun still reaches the
        queue."""
        for task in self._tasks:
            if task is not self._cancelling:
                task.cancel()

    def accept(self) -> list[Accepted]:
        """Returns the requests for one more reader, which must leave by `cancel`."""
        self._presence.join()
        readers = [_SessionReader(self, one) for one in self._followed]
        readers[0].counted = True
        return [
            Accepted(reader.followed.request, reader.followed.sampling, reader)
            for reader in readers
        ]

    def leave(self) -> None:
        self._presence.leave()

    async def cancel(self) -> None:
        """Ends the request for all readers."""
        for one in self._followed:
            await one.cancel()

    async def _guard(self) -> None:
        await self._presence.lost()
        logger.info("request cancelled: no client came back", extra=self._fields)
        self._cancelling = asyncio.current_task()
        await self.cancel()

    @property
    def _fields(self) -> dict[str, object]:
        return {"request_id": self.stored.request_id}


class _SessionReader:
    """One reader's access to a generation: leaving it ends nothing."""

    def __init__(self, session: Session, followed: FollowedRequest) -> None:
        self.followed = followed
        self.counted = False
        self._session = session

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self.followed.log.read()

    async def stop_choice(self, choice: int, tokens: int) -> None:
        """Does nothing: the session has found the same stop string."""

    async def cancel(self) -> None:
        self.leave()

    def leave(self) -> None:
        if self.counted:
            self.counted = False
            self._session.leave()


class Sessions:
    """The sessions of this gateway by the names of their stored requests.

    `settle` is called with the size of the output when a request has ended.
    """

    def __init__(self, client: Client, store: RequestStore, settle: Settle) -> None:
        self._client = client
        self._store = store
        self._settle = settle
        self._sessions: dict[str, asyncio.Task[Session]] = {}

    async def open(
        self, stored: StoredRequest, tokenizer: Tokenizer, *, fresh: bool
    ) -> list[Accepted]:
        """Returns the requests for one more reader; queues them if they are not in the queue.

        Raises QueueFull and BackendUnavailable as the client does; nothing of a `fresh` request is
        queued then.
        """
        opening = self._sessions.get(stored.name)
        if opening is None:
            opening = asyncio.create_task(self._begin(stored, tokenizer, fresh))
            self._sessions[stored.name] = opening
            opening.add_done_callback(lambda done: self._forget_failed(stored.name, done))
        return (await asyncio.shield(opening)).accept()

    async def cancel(self, stored: StoredRequest) -> None:
        """Ends the request if it runs here."""
        opening = self._sessions.get(stored.name)
        if opening is not None and opening.done() and opening.exception() is None:
            await opening.result().cancel()

    def close(self) -> None:
        """Stops following all requests, which may continue at other gateways."""
        for opening in list(self._sessions.values()):
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                opening.result().close()
            else:
                opening.cancel()

    async def _begin(self, stored: StoredRequest, tokenizer: Tokenizer, fresh: bool) -> Session:
        followed: list[FollowedRequest] = []
        sampling = sampling_of(stored)
        try:
            for request in stored.requests:
                followed.append(
                    FollowedRequest(request, await self._client.submit(request), sampling)
                )
        except HeadraceError:
            for one in followed:
                if fresh:
                    await one.cancel()
                else:
                    one.leave()
            raise
        session = Session(stored, followed, self._store, self._settle, self._forget)
        session.start(tokenizer)
        return session

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.stored.name, None)

    def _forget_failed(self, name: str, opening: "asyncio.Task[Session]") -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._sessions.pop(name, None)
