"""Decides which replies about one request reach its client: the gateway's rules, without I/O.

Several engines may send replies about a request: one that died, one that took over, one that froze
and woke, one whose claim was undone by a rollback of Redis. The client must see one history. So the
arbiter, not Redis and not an engine, decides whose replies count (the owner's), and an engine that
continues a request first asks the arbiter what the client has. Any message may come twice, late or
never.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..wire.messages import (
    ChoiceState,
    Control,
    Disown,
    Failed,
    Logprobs,
    Reply,
    Resend,
    Resume,
    Sync,
    Takeover,
    Tokens,
)
from .base import Outcome
from .failures import UNDECIDED

Sender = tuple[str, int]  # engine incarnation, attempt
_ASK_AGAIN = 16  # messages after a gap, or ignored ones, before the same control is sent again


class Deliver(NamedTuple):
    """New tokens of one choice, to be delivered to the client in this order.

    `finish_reason` (stop, length) comes with the last token. `stop_token` is the id of the stop
    token that ended the choice; None for the end-of-sequence token. `logprobs` has one entry for
    each token; it is None if none were requested, or if an engine that is gone computed them.
    `embedding` (packed float32) is the whole answer to a request for one; `prompt_logprobs`
    (packed) come with the first tokens. A tuple, because one is made for every token.
    """

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None = None
    finish_reason: str | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    embedding: bytes | None = None
    prompt_logprobs: bytes | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """A control message to send to an engine."""

    engine_id: str
    control: Control


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends here with this failure."""

    failed: Failed


@dataclass(frozen=True, slots=True)
class Lost:
    """An engine ended the request unnecessarily: ask the queue, which may let it continue."""


@dataclass(frozen=True, slots=True)
class Ignore:
    """Nothing changed; `reason` is the metric's label."""

    reason: str


Action = Deliver | Send | Fail | Lost | Ignore


class _Choice:
    __slots__ = (
        "after_gap",
        "asked",
        "embedding",
        "finish_reason",
        "logprobs",
        "stop_token",
        "token_ids",
    )

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] = []  # one for each token, until a token without any
        self.finish_reason: str | None = None
        self.stop_token: int | None = None
        self.embedding: bytes | None = None
        self.asked = -1  # the gap for which a Resend was sent
        self.after_gap = 0

    def add(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs] | None) -> None:
        if logprobs is not None and len(self.logprobs) == len(self.token_ids):
            self.logprobs += logprobs
        self.token_ids += token_ids

    def state(self) -> ChoiceState:
        known = self.logprobs and len(self.logprobs) == len(self.token_ids)
        return ChoiceState(
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_token=self.stop_token,
            logprobs=tuple(self.logprobs) if known else None,
            embedding=self.embedding,
        )

    def extended_by(self, state: ChoiceState) -> bool:
        """Whether `state` begins with what the client has of this choice."""
        known = len(self.token_ids)
        return self.finish_reason is not None or list(state.token_ids[:known]) == self.token_ids


class Arbiter:
    """The tokens that the client of one request has, and the engine that sent them."""

    def __init__(self, request_id: str, choices: int) -> None:
        self.request_id = request_id
        self.owner: Sender | None = None
        self.failed: Failed | None = None
        self._distrusted = False  # the owner sent other tokens than before: it must ask first
        # the round of the owner's last Takeover: its tokens of earlier rounds are invalid
        self._round = 0
        self._choices = [_Choice() for _ in range(choices)]
        self._open = choices  # the number of choices that have not ended
        self._retired: set[Sender] = set()
        self._ignored: dict[Sender, int] = {}

    @property
    def attempt(self) -> int:
        """The newest attempt of an accepted reply; 0 before the first."""
        return 0 if self.owner is None else self.owner[1]

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return not self._open

    @property
    def ended(self) -> bool:
        return not self._open or self.failed is not None

    def states(self) -> tuple[ChoiceState, ...]:
        return tuple(choice.state() for choice in self._choices)

    @property
    def finish_reasons(self) -> Sequence[str | None]:
        """How each choice ended; None while it runs."""
        return [choice.finish_reason for choice in self._choices]

    def token_count(self, choice: int) -> int:
        return len(self._choices[choice].token_ids)

    def stop_choice(self, choice: int, reason: str = "stop") -> bool:
        """Ends a choice from the client's side; False if it had already ended."""
        if self._choices[choice].finish_reason is not None:
            return False
        self._end(self._choices[choice], reason, None)
        return True

    def follow(self, engine_id: str, reply: Tokens) -> Deliver | None:
        """A fast path of `handle` for the usual reply: the next tokens of a running choice.

        None if the reply is of another kind: nothing was changed, call `handle`.
        """
        if self.owner != (engine_id, reply.attempt) or self._distrusted or self.failed is not None:
            return None
        _, _, number, index, token_ids, logprobs, reason, _, cached, _, prompt, _, asked = reply
        if reason is not None or not token_ids or number >= len(self._choices):
            return None
        choice = self._choices[number]
        ended = choice.finish_reason is not None
        if ended or asked < self._round or index != len(choice.token_ids):
            return None
        choice.add(token_ids, logprobs)
        choice.asked, choice.after_gap = -1, 0
        known_prompt = prompt if index == 0 else None
        fields = (number, token_ids, logprobs, None, None, cached, None, known_prompt)
        return tuple.__new__(Deliver, fields)  # without the Python code of NamedTuple

    def handle(self, engine_id: str, reply: Reply) -> Sequence[Action]:
        """Handles one reply. Call it in the order of the gateway's stream."""
        sender = (engine_id, reply.attempt)
        if self.ended:
            return self._after_end(sender, reply)
        if sender in self._retired:
            return self._refuse(sender, reply, "retired")
        match reply:
            case Tokens():
                return self._tokens(sender, reply)
            case Takeover():
                return self._takeover(sender, reply)
            case Sync():
                return self._sync(sender, reply)
            case Failed():
                return self._failed(sender, reply)

    def adopt(self, states: Sequence[ChoiceState]) -> Sequence[Action]:
        """Takes over the output that a dead gateway had received from the request's owner.

        Changes nothing if that output belongs to another history or is not longer.
        """
        if self.ended or len(states) != len(self._choices) or not self._extended_by(states):
            return []
        return self._deliver_states(states)

    def settle(self, outcome: Outcome) -> Sequence[Action] | None:
        """Completes a request from its stored outcome when its last frames did not arrive.

        None if the outcome belongs to another history than the client's: the missing tokens are
        lost.
        """
        if outcome.failed is not None:
            self.failed = outcome.failed
            return [Fail(outcome.failed)]
        if len(outcome.choices) != len(self._choices) or not self._completed_by(outcome.choices):
            return None
        return self._deliver_states(outcome.choices, outcome.cached_tokens)

    # Rules

    def _tokens(self, sender: Sender, reply: Tokens) -> Sequence[Action]:
        if reply.choice >= len(self._choices):
            return [Ignore("no_such_choice")]
        if self.owner is None:
            self.owner = sender
        if sender == self.owner:
            return self._extend(sender, reply)
        if sender[1] >= self.attempt:
            # An engine has started again because Redis forgot the owner. It must ask before its
            # tokens count.
            return self._nudge(sender, "restarted")
        return self._refuse(sender, reply, "older_attempt")

    def _extend(self, sender: Sender, reply: Tokens) -> Sequence[Action]:
        choice = self._choices[reply.choice]
        if choice.finish_reason is not None:
            return [Ignore("choice_ended")]
        if reply.round < self._round:
            # An old frame, read again: it precedes the Takeover and has tokens of another history.
            return self._nudge(sender, "earlier_round")
        known = len(choice.token_ids)
        if self._distrusted or self._contradicts(choice, reply):
            self._distrusted = True
            return self._nudge(sender, "contradiction")
        if reply.index > known:
            return self._gap(sender, reply.choice)
        new = reply.token_ids[known - reply.index :]
        ends = reply.finish_reason is not None and reply.index + len(reply.token_ids) >= known
        if not new and not ends:
            return [Ignore("duplicate")]
        logprobs = reply.logprobs and reply.logprobs[known - reply.index :]
        choice.add(new, logprobs)
        choice.asked, choice.after_gap = -1, 0
        if ends:
            self._end(choice, reply.finish_reason, reply.stop_token)
            choice.embedding = reply.embedding
        return [
            Deliver(
                choice=reply.choice,
                token_ids=new,
                logprobs=logprobs,
                finish_reason=reply.finish_reason if ends else None,
                stop_token=reply.stop_token if ends else None,
                cached_tokens=reply.cached_tokens,
                embedding=reply.embedding if ends else None,
                prompt_logprobs=None if known else reply.prompt_logprobs,
            )
        ]

    @staticmethod
    def _contradicts(choice: _Choice, reply: Tokens) -> bool:
        """Whether the reply differs from tokens that the client already has."""
        had = choice.token_ids[reply.index : reply.index + len(reply.token_ids)]
        return bool(had) and had != list(reply.token_ids[: len(had)])

    def _gap(self, sender: Sender, number: int) -> Sequence[Action]:
        choice = self._choices[number]
        known = len(choice.token_ids)
        choice.after_gap += 1
        if choice.asked == known and choice.after_gap % _ASK_AGAIN:
            return [Ignore("behind_gap")]
        choice.asked = known
        resend = Resend(request_id=self.request_id, choice=number, index=known)
        return [Send(sender[0], resend)]

    def _takeover(self, sender: Sender, reply: Takeover) -> Sequence[Action]:
        if sender[1] < self.attempt:
            return self._refuse(sender, reply, "older_attempt")
        self._own(sender)
        if reply.rounds_in_tokens:
            self._round = max(self._round, reply.round)
        return [Send(sender[0], self._resume(sender[1], reply.round))]

    def _sync(self, sender: Sender, reply: Sync) -> Sequence[Action]:
        if sender[1] < self.attempt:
            return self._refuse(sender, reply, "older_attempt")
        if len(reply.choices) != len(self._choices) or not self._extended_by(reply.choices):
            return self._nudge(sender, "diverged")
        self._own(sender)
        return self._deliver_states(reply.choices, reply.cached_tokens) or [Ignore("duplicate")]

    def _failed(self, sender: Sender, reply: Failed) -> Sequence[Action]:
        if sender != self.owner and sender[1] < self.attempt:
            return [Ignore("older_attempt")]
        if reply.failure in UNDECIDED:
            return [Lost()]
        self.failed = reply
        return [Fail(reply)]

    # Parts

    def _end(self, choice: _Choice, reason: str | None, stop_token: int | None) -> None:
        """Ends a choice that has not ended, unless there is no reason."""
        if reason is not None:
            choice.finish_reason, choice.stop_token = reason, stop_token
            self._open -= 1

    def _own(self, sender: Sender) -> None:
        """Accepts messages of `sender` from now on, and never again those of earlier senders."""
        if self.owner is not None and self.owner != sender:
            self._retired.add(self.owner)
            self._round = 0
        self.owner = sender
        self._distrusted = False
        for choice in self._choices:
            choice.asked, choice.after_gap = -1, 0

    def _completed_by(self, states: Sequence[ChoiceState]) -> bool:
        pairs = zip(self._choices, states, strict=True)
        return self._extended_by(states) and all(
            c.finish_reason or s.finish_reason for c, s in pairs
        )

    def _extended_by(self, states: Sequence[ChoiceState]) -> bool:
        return all(c.extended_by(s) for c, s in zip(self._choices, states, strict=True))

    def _deliver_states(
        self, states: Sequence[ChoiceState], cached_tokens: int = 0
    ) -> list[Action]:
        actions: list[Action] = []
        for number, (choice, state) in enumerate(zip(self._choices, states, strict=True)):
            if choice.finish_reason is not None:
                continue
            known = len(choice.token_ids)
            new, logprobs = state.token_ids[known:], state.logprobs and state.logprobs[known:]
            choice.add(new, logprobs)
            self._end(choice, state.finish_reason, state.stop_token)
            choice.embedding = state.embedding
            if new or state.finish_reason is not None:
                actions.append(
                    Deliver(
                        choice=number,
                        token_ids=new,
                        logprobs=logprobs,
                        finish_reason=state.finish_reason,
                        stop_token=state.stop_token,
                        cached_tokens=cached_tokens,
                        embedding=state.embedding,
                    )
                )
        return actions

    def _resume(self, attempt: int, number: int) -> Resume:
        return Resume(
            request_id=self.request_id, attempt=attempt, choices=self.states(), round=number
        )

    def _nudge(self, sender: Sender, reason: str) -> Sequence[Action]:
        """Tells an engine that continues another history to stop and ask."""
        if not self._often(sender):
            return [Ignore(reason)]
        return [Send(sender[0], self._resume(sender[1], 0)), Ignore(reason)]

    def _refuse(self, sender: Sender, reply: Reply, reason: str) -> Sequence[Action]:
        """Ignores a reply, and notifies its engine: at once if it asked, else only sometimes."""
        if not isinstance(reply, Takeover | Sync) and not self._often(sender):
            return [Ignore(reason)]
        disown = Disown(request_id=self.request_id, attempt=sender[1], superseded=True)
        return [Send(sender[0], disown), Ignore(reason)]

    def _often(self, sender: Sender) -> bool:
        count = self._ignored[sender] = self._ignored.get(sender, 0) + 1
        return count % _ASK_AGAIN == 1

    def _after_end(self, sender: Sender, reply: Reply) -> Sequence[Action]:
        """The client has its whole answer; an engine that asks gets the client's tokens."""
        if isinstance(reply, Takeover) and self.failed is None and sender not in self._retired:
            return [Send(sender[0], self._resume(sender[1], reply.round))]
        return [Ignore("ended")]
