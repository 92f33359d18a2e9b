"""One request in flight as its caller sees it: an iterator of deltas, to be stopped or cancelled.

Holds what the client has (the arbiter) and hands it on; talks to the queue only through the client
that made it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Self

from headrace_common.errors import FailureCode, RequestFailed
from headrace_common.messages import (
    ChoiceState,
    Control,
    Failed,
    GenerateRequest,
    Reply,
    Resend,
    StopChoice,
    Tokens,
)
from headrace_common.protocol.arbiter import Action, Arbiter, Deliver, Fail, Ignore, Lost, Send
from headrace_common.protocol.base import Outcome

MOST_MERGED = 64  # tokens, so that one stream does not hold up the others
Delta = Deliver  # what the arbiter lets through is what the client gets


class GenerationState(StrEnum):
    QUEUED = "queued"  # no engine has said anything of it yet
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a generation needs of its client."""

    send: Callable[[str, Control], None]
    news: Callable[["Generation"], None]
    ended: Callable[["Generation"], None]
    abandon: Callable[["Generation"], Awaitable[None]]
    lost: Callable[["Generation"], None]
    ignored: Callable[[str], None]
    left: Callable[[str], None]


class Generation:
    """Async iterator of Delta until every choice has ended. Raises RequestFailed.

    Use it in `async with`: leaving the block before the end cancels the request. Cancelling a task
    that waits for the next delta does not (waiting with a timeout is common); cancel() does.

    `holder` is another gateway whose replies it is made from: that one answers the engines.
    """

    def __init__(self, request: GenerateRequest, hooks: Hooks, now: float) -> None:
        self.request = request
        self.arbiter = Arbiter(request.request_id, request.sampling.n)
        self.heard_at = now  # monotonic seconds: when an engine last spoke of it
        self.holder: str | None = None
        self._hooks = hooks
        self._deltas: deque[Delta] = deque()
        self._news: asyncio.Future[None] | None = None  # somebody waits for the next delta
        self._listener: Callable[[], None] | None = None
        self._announced = False
        self._failure: Failed | None = None
        self._ended = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def ended(self) -> bool:
        """Whether no more comes than what can be taken now."""
        return self._ended

    @property
    def state(self) -> GenerationState:
        if self._ended:
            return GenerationState.ENDED
        return GenerationState.QUEUED if self.arbiter.owner is None else GenerationState.RUNNING

    @property
    def shared(self) -> bool:
        """Whether other gateways may have clients of it."""
        return self.request.keep_ms > 0

    @property
    def started(self) -> bool:
        """Whether an engine has spoken of it."""
        return self.arbiter.owner is not None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas and not self._ended:
            await self._next()
        if self._deltas:
            return merged(self._deltas)
        if self._failure is not None:
            raise RequestFailed(self._failure.failure, self._failure.message)
        raise StopAsyncIteration

    async def _next(self) -> None:
        self._news = asyncio.get_running_loop().create_future()
        try:
            await self._news
        finally:
            self._news = None

    def take(self) -> Delta | None:
        """As the iterator, but without waiting: None where nothing has come, or no more comes."""
        return merged(self._deltas) if self._deltas else None

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Has `listener` called when something has come, or the end has, instead of waking the one
        who iterates: once for all that came at a time, and without a task in between."""
        self._listener = listener

    def tell(self) -> None:
        """Calls the listener; the client does so once it has read what there is."""
        self._announced = False
        if self._listener is not None:
            self._listener()
        else:
            self._tell()

    def _tell(self) -> None:
        if self._listener is not None:
            if not self._announced:
                self._announced = True
                self._hooks.news(self)
        elif self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.cancel()

    async def stop_choice(self, choice: int) -> None:
        """Ends a choice as a matched stop string does; its engine stops making tokens of it."""
        if self._ended or not self.arbiter.stop_choice(choice):
            return
        owner = self.arbiter.owner
        if owner is not None:
            self._hooks.send(owner[0], StopChoice(request_id=self.request_id, choice=choice))
        self._end_if_complete()

    async def cancel(self) -> None:
        """Ends the request where it has not ended; the iterator raises. Safe to call twice."""
        if not self._ended:
            self.fail(FailureCode.CANCELLED, "the request was cancelled")
            await self._hooks.abandon(self)

    def leave(self) -> None:
        """Ends it here without ending the request; the iterator raises."""
        if self._ended:
            return
        self._hooks.left(self.request_id)
        self.fail(FailureCode.CANCELLED, "the request was left to other gateways")

    # For the client

    def catch_up(self, owner: tuple[str, int] | None) -> None:
        """Asks the engine that has it for what its holder was told before."""
        if owner is None or self._ended:
            return
        self.arbiter.owner = self.arbiter.owner or owner
        for choice in range(self.request.sampling.n):
            index = self.arbiter.token_count(choice)
            control = Resend(request_id=self.request_id, choice=choice, index=index)
            self._hooks.send(owner[0], control)

    def adopt(self, states: Sequence[ChoiceState]) -> None:
        """Takes what the request's gateway was told before it was gone."""
        self._carry_out(self.arbiter.adopt(states))

    def fail(self, failure: FailureCode, message: str) -> None:
        """Ends the request here; does not tell the queue."""
        self._end(
            Failed(
                request_id=self.request_id,
                attempt=self.arbiter.attempt,
                failure=failure,
                message=message,
            )
        )

    def handle(self, engine_id: str, reply: Reply, now: float) -> None:
        """Takes one reply of an engine."""
        delta = self.arbiter.follow(engine_id, reply) if type(reply) is Tokens else None
        if delta is not None:  # all but always
            self.heard_at = now
            self._deliver(delta)
            return
        actions = self.arbiter.handle(engine_id, reply)
        if not any(isinstance(action, Ignore) for action in actions):
            self.heard_at = now
        self._carry_out(actions)

    def settle(self, outcome: Outcome) -> bool:
        """Takes the stored outcome; False where it is not of the client's history."""
        actions = self.arbiter.settle(outcome)
        if actions is None:
            return False
        self._carry_out(actions)
        return True

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Deliver():
                    self._deliver(action)
                case Send():
                    if self.holder is None or isinstance(action.control, Resend):
                        self._hooks.send(action.engine_id, action.control)
                case Fail():
                    self._end(action.failed)
                case Lost():
                    self._hooks.lost(self)
                case Ignore():
                    self._hooks.ignored(action.reason)
        self._end_if_complete()

    def _deliver(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._tell()

    def _end_if_complete(self) -> None:
        if self.arbiter.complete:
            self._end(None)

    def _end(self, failure: Failed | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._failure = failure
        self._tell()
        self._hooks.ended(self)


def merged(deltas: deque[Delta]) -> Delta:
    """Takes the first of them, with what follows of the same choice: who reads slower than engines
    make tokens gets more at a time. Log probabilities are left as they are, known or not."""
    first = deltas.popleft()
    if not deltas or deltas[0].choice != first.choice:
        return first
    known = first.logprobs is not None
    token_ids, logprobs, last = list(first.token_ids), list(first.logprobs or ()), first
    while (
        deltas
        and deltas[0].choice == first.choice
        and (deltas[0].logprobs is not None) == known
        and len(token_ids) < MOST_MERGED
    ):
        last = deltas.popleft()
        token_ids += last.token_ids
        logprobs += last.logprobs or ()
    return last._replace(
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs) if known else None,
        prompt_logprobs=first.prompt_logprobs,
    )
