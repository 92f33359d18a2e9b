"""The queue's two sides as interfaces: what gateways and engines may ask of it.

Implemented over Redis Streams and, with the same contract tests, in memory. docs/protocol.md has
the promises; nothing here waits by polling.
"""

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from ..messages import ChoiceState, Control, Failed, Frame, GenerateRequest, Reply

# How often a request that has ended is queued again, and for how many seconds it is left to its
# gateway, which asks within a third of them; as in admit.lua.
MOST_ANEW = 5
LOST_HELD_S = 60.0


class AdmitState(StrEnum):
    ADMITTED = "admitted"  # newly in the queue
    ATTACHED = "attached"  # known and alive: its replies now come to this gateway
    ENDED = "ended"  # known and over: `outcome` holds the result
    HELD = "held"  # known and alive, and its replies go on to the gateway `gateway_id`


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended. `failed` is None where every choice finished."""

    choices: tuple[ChoiceState, ...] = ()
    failed: Failed | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """`attempt` is the newest that the queue knows of."""

    state: AdmitState
    owner: str | None = None
    attempt: int = 0
    outcome: Outcome | None = None
    gateway_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a request is now. `outcome` is there once it has ended; where its state was lost, not
    before its gateway has had the time to have it go on."""

    started: bool
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds of one model's queue: waiting requests, their prompt plus maximal output tokens, and
    waiting requests of one tenant (0: only the bound for all)."""

    max_requests: int = 1024
    max_tokens: int = 4_000_000
    max_tenant_requests: int = 0

    def refuse(self, waiting: int, waiting_tokens: int, tokens: int) -> bool:
        """Whether a request of so many tokens is one too many; a lone one may be of any size."""
        too_large = waiting > 0 and waiting_tokens + tokens > self.max_tokens
        return waiting >= self.max_requests or too_large

    def share(self, shards: int) -> "QueueLimits":
        """The part of one of so many shards, rounded up."""
        if shards == 1:
            return self
        return QueueLimits(
            max_requests=-(-self.max_requests // shards),
            max_tokens=-(-self.max_tokens // shards),
            max_tenant_requests=-(-self.max_tenant_requests // shards),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An engine, and how many sequences it runs at once."""

    engine_id: str
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The engines to place a request with, the best one first.

    It is placed with the first whose running and placed requests are fewer than `load_factor` times
    its share of all, by its part of `capacity` (that of all engines). For `hold_ms` from its
    admission it then waits for that engine; from then on any engine with room takes it. Of
    `shards` each one counts what is in itself alone, and has its part of the capacity.
    """

    choices: tuple[Choice, ...]
    capacity: int
    load_factor: float
    hold_ms: int
    shards: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """About where a waiting request is in its queue (1: next), and in how many seconds it may
    start, by the rate at which others have lately ended (None where nothing has)."""

    position: int
    eta: float | None

    @classmethod
    def behind(cls, ahead: int, rate: float) -> "Place":
        """The place behind so many others, of which `rate` go a second."""
        return cls(position=ahead + 1, eta=(ahead + 1) / rate if rate > 0 else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepth:
    """Waiting and started requests of one model; `oldest_age` in seconds, of the waiting ones."""

    waiting: int
    waiting_tokens: int
    pending: int
    oldest_age: float
    dead_letters: int = 0

    @classmethod
    def of_all(cls, shards: Sequence["QueueDepth"]) -> "QueueDepth":
        """That of a model with these shards."""
        return cls(
            waiting=sum(shard.waiting for shard in shards),
            waiting_tokens=sum(shard.waiting_tokens for shard in shards),
            pending=sum(shard.pending for shard in shards),
            oldest_age=max(shard.oldest_age for shard in shards),
            dead_letters=sum(shard.dead_letters for shard in shards),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """What an engine tells of itself with every beat; it lapses with the lease.

    `last_step_age` is seconds since its last finished step, 0 while idle and able to make one. It
    takes from the first `shards` of its model's queue, and may take from more.
    """

    engine_id: str
    model: str
    max_model_len: int
    running: int
    capacity: int
    kv_utilization: float
    tokens_per_second: float
    last_step_age: float
    draining: bool
    version: str
    shards: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A request that this engine now owns, until it finishes, gives back or stops beating.

    `attempt` fences: it grows with each delivery. `recovered`: another engine may have sent tokens
    already, so ask the gateway (Takeover) before running it. `suspect`: it failed without progress
    before and must run alone. `placed`: whether it was placed with this engine or with another;
    None where with none. `waited` and `left` are the seconds since it was admitted and until its
    deadline, by the queue's clock: the engine's own may be another.
    """

    request: GenerateRequest
    attempt: int
    gateway_id: str
    recovered: bool = False
    suspect: bool = False
    placed: bool | None = None
    waited: float = field(default=0.0, compare=False)
    left: float = field(default=math.inf, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One owned request in a beat: the choices' output behind what the journal has.

    `journaled[i]` tokens of choice i are in the journal already, as the last Beat said (0 before);
    `choices[i].token_ids` are those behind. `executing` is False while the request only waits in
    the engine: its failure then does not count against it. So beat a request once, at once, when
    its first step starts.
    """

    request_id: str
    attempt: int
    journaled: tuple[int, ...]
    choices: tuple[ChoiceState, ...]
    executing: bool = True


class Verdict(StrEnum):
    OWNED = "owned"
    CANCELLED = "cancelled"
    STOLEN = "stolen"  # another engine owns it now: drop it and say nothing more
    EXPIRED = "expired"  # its deadline is over
    MISSING = "missing"  # Redis has lost it: keep running, its gateway admits it again


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Verdict on one Progress.

    `gateway_id` is where its replies go from now on ("" where MISSING or STOLEN: unchanged); where
    it has changed, send a Sync there first. `journaled` is what the journal holds of each choice:
    the next Progress starts there (less than before where Redis has lost something).
    """

    verdict: Verdict
    gateway_id: str = ""
    journaled: tuple[int, ...] = ()


class GatewayQueue(Protocol):
    """One incarnation of a gateway. Raises BackendUnavailable where Redis cannot be reached."""

    gateway_id: str

    async def start(self) -> None:
        """Registers the gateway and makes its reply stream."""

    async def admit(
        self,
        request: GenerateRequest,
        limits: QueueLimits,
        *,
        seen: int | None = None,
        polite: bool = False,
        disputed: bool = False,
        placement: Placement | None = None,
    ) -> Admission:
        """Queues a request; safe to repeat with the same request_id.

        With `placement` it is placed with an engine when it is first queued; it keeps its place in
        the queue, but that engine may take it somewhat sooner and others somewhat later.

        `seen` marks a repetition for a request accepted before, with the newest attempt known of
        it: it is not refused for want of room, and if Redis has lost it, goes on behind `seen`.
        Where it was another gateway's, its engine is told; with `polite` that one keeps it (HELD),
        and this one may follow `frames_to` it. Raises QueueFull, RequestConflict.

        A request whose state was lost is queued again (ADMITTED), behind all attempts that it had,
        up to MOST_ANEW times and not after its deadline; `polite` leaves that to its gateway for
        LOST_HELD_S. With `seen` so is an abandoned one. With `disputed` so is one that is done,
        where this is its gateway, whose client has tokens of another history than the outcome's;
        the outcome must be of no later attempt than `seen`, and nobody else may have been given it:
        by `give_out`, by `admit` without `seen`, or as HELD.
        """

    def frames(self) -> AsyncIterator[Frame]:
        """This gateway's reply stream in order, for ever; after a reconnect from its beginning."""

    async def frames_to(self, gateway_id: str) -> AsyncIterator[Frame]:
        """Another gateway's reply stream, for ever: all that is written after this has returned."""

    async def gateway_alive(self, gateway_id: str) -> bool: ...

    async def standing(self, request_id: str, model: str) -> Standing | None:
        """Where a request is; changes nothing. None where the queue does not know it."""

    async def give_out(self, request_id: str, model: str) -> Standing | None:
        """As `standing`, for somebody who is given the outcome, where it is done: from then on it
        cannot be `disputed`."""

    async def place(self, request_id: str, model: str) -> Place | None:
        """About where a waiting request is in its queue; None where it does not wait."""

    async def journal(self, request_id: str, model: str) -> tuple[ChoiceState, ...] | None:
        """As EngineQueue.journal, for a gateway that goes on with another one's request."""

    async def send(self, engine_id: str, control: Control) -> None:
        """Puts a control message before an engine."""

    async def cancel(self, request_id: str, model: str) -> None:
        """Ends a request: a waiting one at once, a running one through its engine. Idempotent."""

    async def forget(self, request_ids: Sequence[str], model: str) -> None:
        """Outcomes of ended requests that nobody asks for any more: they need not be kept."""

    async def release(self, request_id: str, model: str, engine_id: str, attempt: int) -> None:
        """Makes a request whose engine went silent claimable at once, if that still owns it."""

    async def depth(self, model: str) -> QueueDepth: ...

    async def engines(self, model: str) -> Sequence[EngineStatus]: ...

    async def drain_rate(self, model: str) -> float:
        """Requests a second that have lately left the queue; 0 where unknown."""

    async def beat(self) -> None:
        """Says that this gateway lives and renews its stream."""

    async def close(self) -> None:
        """Says that this gateway is gone."""


class EngineQueue(Protocol):
    """One incarnation of an engine, serving one model. Raises BackendUnavailable as above."""

    engine_id: str

    async def start(self) -> None: ...

    async def take(self, count: int, prompt_tokens: int | None = None) -> Sequence[Lease]:
        """At most `count` waiting requests, by priority, tenants' shares and age; never waits.

        Of the next ones, those that are placed with this engine go before, within bounds
        (docs/protocol.md); one that is placed with another is left to that for a moment.

        With `prompt_tokens`, stops before the prompts together exceed it: the request stays first
        in the queue. An idle engine passes None, since what does not fit it then never will.
        Expired, cancelled and superseded entries are ended on the way, malformed ones
        dead-lettered and answered.
        """

    async def reap(self, count: int, *, suspects: bool = True) -> Sequence[Lease]:
        """At most `count` requests whose owners stopped beating, with `recovered` set.

        At most one of them is a suspect, and none where `suspects` is False (one is in hand). Call
        it with every beat while there is room, and after wait().
        """

    async def wait(self) -> None:
        """Returns when the queue may hold something new to take; blocks on the socket until then.

        What the last take() left for want of `prompt_tokens` is not new: wait for room as well.
        What it left to another engine is, once that has not taken it for so long that it is
        anybody's. May return early; cancelling it is cheap.
        """

    async def beat(self, progress: Sequence[Progress], status: EngineStatus) -> Mapping[str, Beat]:
        """Renews the leases, writes the journal, publishes the status; a Beat per request_id."""

    async def journal(self, request_id: str) -> tuple[ChoiceState, ...] | None:
        """What is known of a request whose gateway is gone: journal and tail of its stream.

        None where nothing is known; the client may have got tokens all the same.
        """

    async def resume(self, request_id: str, attempt: int, choices: Sequence[ChoiceState]) -> bool:
        """Sets the journal to exactly these tokens, before new ones; False where not the owner."""

    async def publish(self, replies: Mapping[str, Sequence[Reply]]) -> None:
        """One packed frame per gateway id, in one round trip.

        Safe to repeat after BackendUnavailable. An empty sequence is a sign of life: send one each
        second to every gateway with a request here that got nothing else, or it gives them away.
        """

    def controls(self) -> AsyncIterator[Control]:
        """Control messages for this engine, for ever; blocks on the socket."""

    async def gateway_alive(self, gateway_id: str) -> bool: ...

    async def finish(self, request_id: str, attempt: int, outcome: Outcome) -> bool:
        """Ends a request, stores its outcome; False where not the owner. Works in a full Redis."""

    async def give_back(self, request_ids: Sequence[str]) -> None:
        """Makes own requests claimable at once, without counting it as a failure."""

    async def close(self) -> None: ...


class ShardQueue(EngineQueue, Protocol):
    """An engine's queue of one shard, as a part of a queue of several."""

    shard: int

    @property
    def holds_more(self) -> bool:
        """Whether the last take() left something: for want of room, or to another engine."""

    @property
    def lacks_room(self) -> bool:
        """Whether it was for want of room."""

    async def renew(self, progress: Sequence[Progress]) -> Mapping[str, Beat]:
        """As beat, but for the engine's status, which is in the first shard."""

    async def tell_shards(self, shards: int) -> int:
        """Of the first shard: notes that the engine takes from so many shards; returns from how
        many it should, since there may be something in what others have taken from lately."""
