"""One request in flight as its caller sees it: an iterator of deltas that can be stopped or
cancelled.

The arbiter knows what the client has. Talks to the queue only through the client that made it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from headrace_common.errors import FailureCode, RequestFailed
from headrace_common.protocol.arbiter import Action, Arbiter, Deliver, Fail, Ignore, Lost, Send
from headrace_common.protocol.base import Outcome, Placement
from headrace_common.wire.messages import (
    ChoiceState,
    Control,
    Failed,
    GenerateRequest,
    Reply,
    Resend,
    StopChoice,
    Tokens,
)

from .ports import Listener, Write
from .request_history import Timeline

MOST_MERGED = 64  # tokens per turn, so that one stream does not delay the others
Delta = Deliver  # the client gets the tokens that the arbiter accepts


@dataclass(frozen=True, slots=True)
class GenerationCallbacks:
    """The methods of the client that a generation calls."""

    send: Callable[[str, str, Control], None]  # sends a message to an engine of a model
    new_deltas: Callable[["Generation"], None]  # has `notify` called soon
    ended: Callable[["Generation"], None]
    abandon: Callable[["Generation"], Awaitable[None]]
    lost: Callable[["Generation"], None]
    ignored: Callable[[str], None]
    left: Callable[[str], None]
    given: Callable[["Generation"], None]  # the client was given other tokens than engines count
    taken: Callable[["Generation", str, int], None]  # its first engine, with the cached tokens


class Generation:
    """Async iterator of Delta until every choice has ended. Raises RequestFailed.

    Use it in `async with`: leaving the block before the end cancels the request. Cancelling a task
    that waits for the next delta does not cancel the request (waiting with a timeout is common);
    cancel() does.

    `timeline` notes what happens for consoles. `holder` is another gateway, whose replies this
    generation reads: that gateway answers the engines. `placement` is how it was queued.
    """

    def __init__(
        self,
        request: GenerateRequest,
        callbacks: GenerationCallbacks,
        now: float,
        placement: Placement | None = None,
    ) -> None:
        self.request = request
        self.arbiter = Arbiter(request.request_id, request.sampling.n)
        self.heard_at = now  # monotonic seconds of an engine's last message about it
        self.placement = placement
        self.holder: str | None = None
        self.timeline: Timeline | None = None
        self._callbacks = callbacks
        self._deltas: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = (
            None  # set while a task waits for the next delta
        )
        self._listener: Listener | None = None
        self._announced = False
        self._stopped: dict[int, int] = {}  # tokens of choices that stop strings ended
        self._failure: Failed | None = None
        self.ended = False  # whether no more deltas come after those that can be taken now

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def shared(self) -> bool:
        """Whether other gateways may have clients of it."""
        return self.request.keep_ms > 0

    @property
    def given(self) -> int:
        """How many output tokens the client was given."""
        choices = range(self.request.sampling.n)
        return sum(self._stopped.get(n, self.arbiter.token_count(n)) for n in choices)

    @property
    def failed(self) -> bool:
        """Whether it ended without a whole answer."""
        return self._failure is not None

    @property
    def owner(self) -> tuple[str, int] | None:
        """The engine that has it, or had it at its end, and the attempt; None before the first
        reply, and while another gateway has the request."""
        return self.arbiter.owner if self.holder is None else None

    def tokens(self, choice: int) -> Sequence[int]:
        """The output tokens of a choice that the client was given."""
        return self.arbiter.states()[choice].token_ids[: self._stopped.get(choice)]

    def ended_by_itself(self, choice: int) -> bool:
        """Whether the model ended a choice, not a bound or a stop string."""
        return choice not in self._stopped and self.arbiter.finish_reasons[choice] == "stop"

    @property
    def started(self) -> bool:
        """Whether an engine has reported it."""
        return self.arbiter.owner is not None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas and not self.ended:
            await self._next()
        if self._deltas:
            return merged(self._deltas)
        if self._failure is not None:
            raise RequestFailed(self._failure.failure, self._failure.message)
        raise StopAsyncIteration

    async def _next(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> Delta | None:
        """Returns the next delta without waiting; None if nothing has come, or nothing more
        comes."""
        deltas = self._deltas
        if len(deltas) == 1:
            return deltas.pop()
        return merged(deltas) if deltas else None

    def listen(self, listener: Listener | None) -> None:
        """Has `listener` called when deltas come and at the end.

        It replaces waking a task that iterates, and is called once for deltas that came together.
        The function that it returns, if any, is called after the listeners of other generations.
        """
        self._listener = listener

    def notify(self) -> Write | None:
        """Calls the listener, after the client has read all frames that have arrived.

        Returns what the listener returns, which the caller must call.
        """
        self._announced = False
        if self._listener is not None:
            return self._listener()
        self._notify()
        return None

    def _notify(self) -> None:
        if self._listener is not None:
            if not self._announced:
                self._announced = True
                self._callbacks.new_deltas(self)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.cancel()

    async def stop_choice(self, choice: int, tokens: int) -> None:
        """Ends a choice in which a stop string was found; its engine stops generating it.

        The client is given `tokens` of it.
        """
        self._stopped[choice] = tokens
        if self.ended:
            self._callbacks.given(self)
        if self.ended or not self.arbiter.stop_choice(choice):
            return
        owner = self.arbiter.owner
        if owner is not None:
            stop = StopChoice(request_id=self.request_id, choice=choice)
            self._callbacks.send(owner[0], self.request.model, stop)
        self._end_if_complete()

    async def cancel(self) -> None:
        """Ends the request if it has not ended; the iterator raises. Can be called twice."""
        if not self.ended:
            self.fail(FailureCode.CANCELLED, "the request was cancelled")
            await self._callbacks.abandon(self)

    def leave(self) -> None:
        """Stops following it here without ending the request; the iterator raises."""
        if self.ended:
            return
        self._callbacks.left(self.request_id)
        self.fail(FailureCode.CANCELLED, "the request was left to other gateways")

    # For the client

    def catch_up(self, owner: tuple[str, int] | None) -> None:
        """Asks the engine that has the request for the tokens that its holder was sent before."""
        if owner is None or self.ended:
            return
        self.arbiter.owner = self.arbiter.owner or owner
        for choice in range(self.request.sampling.n):
            index = self.arbiter.token_count(choice)
            control = Resend(request_id=self.request_id, choice=choice, index=index)
            self._callbacks.send(owner[0], self.request.model, control)

    def adopt(self, states: Sequence[ChoiceState]) -> None:
        """Takes over what the request's former gateway had received."""
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
        if delta is not None:  # the usual case
            self.heard_at = now
            self._deliver(delta)
            return
        is_first = not self.started
        actions = self.arbiter.handle(engine_id, reply)
        if is_first and self.started and type(reply) is Tokens and reply.attempt == 1:
            self._callbacks.taken(self, engine_id, reply.cached_tokens)
        if not any(isinstance(action, Ignore) for action in actions):
            self.heard_at = now
        if self.timeline is not None:
            self.timeline.answered(engine_id, reply, actions)
        self._carry_out(actions)

    def settle(self, outcome: Outcome) -> bool:
        """Applies the stored outcome; returns False if it is not of the client's history."""
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
                        self._callbacks.send(action.engine_id, self.request.model, action.control)
                case Fail():
                    self._end(action.failed)
                    if self.holder is None:
                        self._callbacks.given(self)
                case Lost():
                    self._callbacks.lost(self)
                case Ignore():
                    self._callbacks.ignored(action.reason)
        self._end_if_complete()

    def _deliver(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._notify()

    def _end_if_complete(self) -> None:
        if self.arbiter.complete and not self.ended:
            self._end(None)
            if self._stopped:
                self._callbacks.given(self)

    def _end(self, failure: Failed | None) -> None:
        if self.ended:
            return
        self.ended = True
        self._failure = failure
        if self.timeline is not None:
            self.timeline.end(failure)
        self._notify()
        self._callbacks.ended(self)


def merged(deltas: list[Delta]) -> Delta:
    """Takes the first delta, merged with those that follow of the same choice.

    A reader that is slower than the engines gets more at a time. Deltas with and without log
    probabilities are not merged.
    """
    first = last = deltas[0]
    if len(deltas) == 1:
        deltas.clear()
        return first
    known = first.logprobs is not None
    token_ids, logprobs, taken = list(first.token_ids), list(first.logprobs or ()), 1
    while (
        taken < len(deltas)
        and deltas[taken].choice == first.choice
        and (deltas[taken].logprobs is not None) == known
        and len(token_ids) < MOST_MERGED
    ):
        last = deltas[taken]
        token_ids += last.token_ids
        logprobs += last.logprobs or ()
        taken += 1
    del deltas[:taken]
    return last._replace(
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs) if known else None,
        prompt_logprobs=first.prompt_logprobs,
    )
