"""Requests that outlive their HTTP connections: each runs here once, for any number of readers.

A reader gets every token from the first on, one by one, whenever it comes. Who has had no reader
for its window, here or at another gateway, is cancelled.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace

from headrace_common.errors import FailureCode, HeadraceError, RequestFailed
from headrace_common.messages import GenerateRequest
from headrace_common.protocol.store import RequestStore, StoredRequest
from headrace_common.sampling import SamplingParams
from headrace_common.text import ChoiceText
from headrace_common.tokenizer import Tokenizer

from .admission import Accepted
from .generation import Delta
from .ports import Client, Generation
from .ports import Delta as AnyDelta
from .tenant_stores import token_bytes
from .wanted import Readers

logger = logging.getLogger(__name__)

Settle = Callable[[StoredRequest, int], Awaitable[None]]


def sampling_of(stored: StoredRequest) -> SamplingParams:
    """As its readers need it: with the stop strings, which the queue's request has not."""
    return replace(stored.requests[0].sampling, stop=stored.stop)


class Log:
    """The deltas of one request in the queue, each of one token, to be read from the beginning."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._failure: HeadraceError | None = None
        self._ended = False
        self._news = asyncio.Event()

    @property
    def tokens(self) -> int:
        """The number of tokens so far."""
        return sum(len(delta.token_ids) for delta in self._deltas)

    def add(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._tell()

    def end(self, failure: HeadraceError | None = None) -> None:
        self._ended, self._failure = True, failure
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def read(self) -> AsyncIterator[Delta]:
        """Raises what ended the request without an answer."""
        position = 0
        while True:
            news = self._news
            while position < len(self._deltas):
                yield self._deltas[position]
                position += 1
                if position % 64 == 0:
                    await asyncio.sleep(0)  # a long answer must not hold up other streams
            if position == len(self._deltas) and self._ended:
                if self._failure is not None:
                    raise self._failure
                return
            if position == len(self._deltas):
                await news.wait()


def single_tokens(delta: AnyDelta) -> Iterator[Delta]:
    """The same news token by token: events must not depend on how engines cut their output."""
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
    """Finds the stop strings of a request that nobody may be reading."""

    def __init__(self, request: GenerateRequest, sampling: SamplingParams, tok: Tokenizer) -> None:
        prompt = request.prompt_token_ids
        self._open = {
            choice: ChoiceText(tok, prompt, sampling)
            for choice in (range(sampling.n) if sampling.stop else ())
        }

    def found(self, delta: Delta) -> bool:
        """Whether the choice's text ends here."""
        text = self._open.get(delta.choice)
        if text is None or delta.finish_reason is not None:
            return False
        if text.push(delta.token_ids).stop is None:
            return False
        del self._open[delta.choice]
        return True


class Track:
    """One request of the queue within a session: follows its generation to the end."""

    def __init__(
        self, request: GenerateRequest, generation: Generation, sampling: SamplingParams
    ) -> None:
        self.request = request
        self.sampling = sampling
        self._generation = generation
        self.log = Log()

    async def follow(self, tokenizer: Tokenizer) -> None:
        stops = _Stops(self.request, self.sampling, tokenizer)
        failure: HeadraceError | None = RequestFailed(FailureCode.INTERNAL, "the gateway failed")
        try:
            async for delta in self._generation:
                for single in single_tokens(delta):
                    self.log.add(single)
                    if stops.found(single):
                        await self._generation.stop_choice(single.choice)
            failure = None
        except HeadraceError as error:
            failure = error
        finally:
            self.log.end(failure)

    @property
    def output_bytes(self) -> int:
        """What its output takes where it is stored."""
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
        tracks: list[Track],
        store: RequestStore,
        settle: Settle,
        on_end: Callable[["Session"], None],
    ) -> None:
        self.stored = stored
        self._readers = Readers(stored, store)
        self._tracks = tracks
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
        await asyncio.gather(*(track.follow(tokenizer) for track in self._tracks))
        await self._settle(self.stored, sum(track.output_bytes for track in self._tracks))

    def _end(self, follow: "asyncio.Task[None]") -> None:
        self.close()
        self._on_end(self)
        if not follow.cancelled() and (error := follow.exception()) is not None:
            logger.critical("a session failed", extra=self._fields, exc_info=error)

    def close(self) -> None:
        """Stops following, and ends nothing; a cancellation under way still reaches the queue."""
        for task in self._tasks:
            if task is not self._cancelling:
                task.cancel()

    def accept(self) -> list[Accepted]:
        """The request for one more reader, who must leave it by `cancel`."""
        self._readers.join()
        readers = [_Reader(self, track) for track in self._tracks]
        readers[0].counted = True
        return [Accepted(reader.track.request, reader.track.sampling, reader) for reader in readers]

    def leave(self) -> None:
        self._readers.leave()

    async def cancel(self) -> None:
        """Ends the request for everybody."""
        for track in self._tracks:
            await track.cancel()

    async def _guard(self) -> None:
        await self._readers.lost()
        logger.info("request cancelled: no client came back", extra=self._fields)
        self._cancelling = asyncio.current_task()
        await self.cancel()

    @property
    def _fields(self) -> dict[str, object]:
        return {"request_id": self.stored.request_id}


class _Reader:
    """A generation for one reader: leaving it ends nothing."""

    def __init__(self, session: Session, track: Track) -> None:
        self.track = track
        self.counted = False
        self._session = session

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self.track.log.read()

    async def stop_choice(self, choice: int) -> None:
        """The session has found the same stop string."""

    async def cancel(self) -> None:
        self.leave()

    def leave(self) -> None:
        if self.counted:
            self.counted = False
            self._session.leave()


class Sessions:
    """The sessions of this gateway by the names of their stored requests.

    `settle` is told what the output of one takes that has ended.
    """

    def __init__(self, client: Client, store: RequestStore, settle: Settle) -> None:
        self._client = client
        self._store = store
        self._settle = settle
        self._sessions: dict[str, asyncio.Task[Session]] = {}

    async def open(
        self, stored: StoredRequest, tokenizer: Tokenizer, *, fresh: bool
    ) -> list[Accepted]:
        """The request for one more reader; queues it where it is not in the queue yet.

        Raises QueueFull and BackendUnavailable as the client does; then nothing of a `fresh` one is
        queued.
        """
        opening = self._sessions.get(stored.name)
        if opening is None:
            opening = asyncio.create_task(self._begin(stored, tokenizer, fresh))
            self._sessions[stored.name] = opening
            opening.add_done_callback(lambda done: self._forget_failed(stored.name, done))
        return (await asyncio.shield(opening)).accept()

    async def cancel(self, stored: StoredRequest) -> None:
        """Ends it where it runs here."""
        opening = self._sessions.get(stored.name)
        if opening is not None and opening.done() and opening.exception() is None:
            await opening.result().cancel()

    def close(self) -> None:
        """Stops following all of them; others may go on."""
        for opening in list(self._sessions.values()):
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                opening.result().close()
            else:
                opening.cancel()

    async def _begin(self, stored: StoredRequest, tokenizer: Tokenizer, fresh: bool) -> Session:
        tracks: list[Track] = []
        sampling = sampling_of(stored)
        try:
            for request in stored.requests:
                tracks.append(Track(request, await self._client.submit(request), sampling))
        except HeadraceError:
            for track in tracks:
                if fresh:
                    await track.cancel()
                else:
                    track.leave()
            raise
        session = Session(stored, tracks, self._store, self._settle, self._forget)
        session.start(tokenizer)
        return session

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.stored.name, None)

    def _forget_failed(self, name: str, opening: "asyncio.Task[Session]") -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._sessions.pop(name, None)
