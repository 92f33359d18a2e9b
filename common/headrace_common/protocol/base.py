"""The queue's two sides as interfaces: the operations of gateways and of engines.

Implemented over Redis Streams and, with the same contract tests, in memory. docs/protocol.md has
the guarantees; nothing here polls.
"""

import math
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from ..wire.messages import ChoiceState, Control, Failed, Frame, GenerateRequest, Reply
from .ledger import AttemptUsage

# A request that has ended may be queued again this often. For LOST_RESERVED_S only its own gateway
# may do so; it asks within a third of that time. Both are also in admit.lua.
MAX_REQUEUES = 5
LOST_RESERVED_S = 60.0


class AdmitState(StrEnum):
    ADMITTED = "admitted"  # newly in the queue
    ATTACHED = "attached"  # known and alive: its replies now come to this gateway
    ENDED = "ended"  # known and over: `outcome` holds the result
    FOLLOWING = "following"  # known and alive: its replies still go to the gateway `gateway_id`


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended. `failed` is None if every choice finished."""

    choices: tuple[ChoiceState, ...] = ()
    failed: Failed | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitResult:
    """The result of an `admit`. `attempt` is the newest one that the queue knows."""

    state: AdmitState
    owner: str | None = None
    attempt: int = 0
    outcome: Outcome | None = None
    gateway_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """The state of a request.

    `outcome` is set once the request has ended. If its state was lost, `outcome` is set only after
    its gateway has had time to queue it again.
    """

    started: bool
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds of one model's queue.

    They bound the waiting requests, their prompt plus maximal output tokens, and the waiting
    requests of one tenant (0: no bound for a single tenant). The others bound the stored images of
    one tenant, and their bytes.
    """

    max_requests: int = 1024
    max_tokens: int = 4_000_000
    max_tenant_requests: int = 0
    max_tenant_images: int = 1024
    max_tenant_image_bytes: int = 64 * 2**20

    def refuse(self, waiting: int, waiting_tokens: int, tokens: int) -> bool:
        """Whether a request of `tokens` exceeds a bound; in an empty queue any size is allowed."""
        too_large = waiting > 0 and waiting_tokens + tokens > self.max_tokens
        return waiting >= self.max_requests or too_large

    def share(self, shards: int) -> "QueueLimits":
        """The bounds of one of `shards` shards, rounded up."""
        if shards == 1:
            return self
        return QueueLimits(
            max_requests=-(-self.max_requests // shards),
            max_tokens=-(-self.max_tokens // shards),
            max_tenant_requests=-(-self.max_tenant_requests // shards),
            max_tenant_images=-(-self.max_tenant_images // shards),
            max_tenant_image_bytes=-(-self.max_tenant_image_bytes // shards),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An engine, how many sequences it runs at once, and how many of the prompt's tokens it is
    believed to have cached."""

    engine_id: str
    capacity: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The engines that a request may be placed with, the best one first.

    An engine's share of all requests is its part of `capacity`, which is that of all engines. The
    request is placed with the first candidate whose running and placed requests are fewer than
    `load_factor` times its share. For `hold_ms` after admission the request waits for that engine;
    after that any engine with room takes it. Each of `shards` counts only its own requests and has
    an equal part of the capacity.
    """

    candidates: tuple[Candidate, ...]
    capacity: int
    load_factor: float
    hold_ms: int
    shards: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePosition:
    """The approximate position of a waiting request (1: next) and its estimated wait.

    `eta` is in seconds, from the rate at which requests have lately ended; None if none has.
    """

    position: int
    eta: float | None

    @classmethod
    def after(cls, ahead: int, rate: float) -> "QueuePosition":
        """The position after `ahead` other requests, of which `rate` end each second."""
        return cls(position=ahead + 1, eta=(ahead + 1) / rate if rate > 0 else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepth:
    """Numbers of waiting and started requests of one model.

    `oldest_age` is the age of the oldest waiting request in seconds, `others_oldest_age` that of
    the oldest one that is not of low priority. `low_time_used` is the share of its time, from
    admission to deadline, for which the oldest waiting request of low priority has waited.
    """

    waiting: int
    waiting_tokens: int
    pending: int
    oldest_age: float
    dead_letters: int = 0
    others_oldest_age: float = 0.0
    low_waiting: int = 0
    low_pending: int = 0
    low_time_used: float = 0.0

    @classmethod
    def of_all(cls, shards: Sequence["QueueDepth"]) -> "QueueDepth":
        """The depth of a model from those of its shards."""
        return cls(
            waiting=sum(shard.waiting for shard in shards),
            waiting_tokens=sum(shard.waiting_tokens for shard in shards),
            pending=sum(shard.pending for shard in shards),
            oldest_age=max(shard.oldest_age for shard in shards),
            dead_letters=sum(shard.dead_letters for shard in shards),
            others_oldest_age=max(shard.others_oldest_age for shard in shards),
            low_waiting=sum(shard.low_waiting for shard in shards),
            low_pending=sum(shard.low_pending for shard in shards),
            low_time_used=max(shard.low_time_used for shard in shards),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """The status that an engine publishes with every beat. It expires with the lease.

    `last_step_age` is the seconds since its last finished step; 0 while it is idle and healthy. The
    engine takes from the first `shards` shards of its model's queue, and may take from more. `name`
    is for people; it may be empty. `shows_batch` says that it writes snapshots after a Watch.
    `sleep_level` is above 0 while it sleeps, and already or still while it falls asleep or wakes.
    `time_to_turn` is in how many seconds it will be awake at the latest, if it shares its
    accelerator, sleeps and has work; else 0.
    `variant` is its side (`variants`). `kv_role` is one of KVRole; a consumer computes prompts of
    up to `max_local_prefill_length` tokens itself.
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
    name: str = ""
    shows_batch: bool = False
    sleep_level: int = 0
    time_to_turn: float = 0.0
    variant: str = ""
    kv_role: str = "kv_both"
    max_local_prefill_length: int = 0

    @property
    def takes_work(self) -> bool:
        return not self.draining and not self.sleep_level


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    """The percentage of new requests for a model's canary, and how many requests of the stable
    engines are repeated on it each minute."""

    percent: float = 0.0
    comparisons_per_minute: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBounds:
    """Bounds of what an engine takes; it leaves other requests to other engines for `hold` seconds.

    New requests have `fewest` to `most` prompt tokens (None: any number). `handed_over` says
    whether the engine takes requests whose KV another one has handed over.
    """

    fewest: int = 0
    most: int | None = None
    handed_over: bool = True
    hold: float = 0.0

    def includes(self, prompt_tokens: int) -> bool:
        return self.fewest <= prompt_tokens and (self.most is None or prompt_tokens <= self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A request that this engine owns until it finishes it, gives it back or stops beating.

    `attempt` is the fencing token: it grows with each delivery. `recovered`: another engine may
    already have sent tokens, so ask the gateway (Takeover) before running it. `suspect`: it failed
    without progress before and must run alone. `placed`: whether it was placed with this engine;
    None if it was placed with none. `waited` and `left` are the seconds since admission and until
    the deadline, by the queue's clock, which may differ from the engine's.

    `foreign`: an engine of the other side, with other weights, ran it before. If its client has
    tokens, it must not continue here: give it back (`for_own_side`). `abandoned`: its own side is
    gone for good, so it must fail instead.
    """

    request: GenerateRequest
    attempt: int
    gateway_id: str
    recovered: bool = False
    suspect: bool = False
    placed: bool | None = None
    waited: float = field(default=0.0, compare=False)
    left: float = field(default=math.inf, compare=False)
    foreign: bool = False
    abandoned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One owned request in a beat: the output that the journal does not have yet.

    `journaled[i]` tokens of choice i are already in the journal, as the last Beat said (0 before
    the first); `choices[i].token_ids` are those after them. `executing` is False while the request
    only waits in the engine: if the engine then dies, that does not count as a failure of the
    request. So beat a request immediately when its first step starts. `usage` is what the attempt
    has used.
    """

    request_id: str
    attempt: int
    journaled: tuple[int, ...]
    choices: tuple[ChoiceState, ...]
    executing: bool = True
    usage: AttemptUsage = AttemptUsage()


class Verdict(StrEnum):
    OWNED = "owned"
    CANCELLED = "cancelled"
    STOLEN = "stolen"  # another engine owns it now: drop it and send nothing more
    EXPIRED = "expired"  # its deadline has passed
    MISSING = "missing"  # Redis has lost it: continue, its gateway admits it again


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The verdict on one Progress.

    Replies go to `gateway_id` from now on ("" if MISSING or STOLEN: unchanged); if it has changed,
    send a Sync there first. `journaled` is the number of tokens of each choice in the journal: the
    next Progress starts there. It shrinks if Redis has lost data.
    """

    verdict: Verdict
    gateway_id: str = ""
    journaled: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TenantUse:
    """The tokens that each tenant has used in one shard since `epoch`, as fairness counts them.

    The epoch changes when the shard's counters begin again.
    """

    epoch: str
    tokens: Mapping[str, int]


class GatewayQueue(Protocol):
    """The queue for one incarnation of a gateway.

    Raises BackendUnavailable if Redis cannot be reached.
    """

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
    ) -> AdmitResult:
        """Queues a request. Repeating it with the same request_id is safe.

        With `placement` the request is placed with an engine when it is first queued. It keeps its
        position in the queue, but that engine may take it a little sooner and others a little
        later.

        `seen` marks a repetition for a request that was accepted before; it is the newest attempt
        known. The request is then not refused for lack of room, and if Redis has lost it, its
        attempts continue after `seen`. If it belonged to another gateway, its engine is told to
        send replies here; with `polite` it stays with that gateway (FOLLOWING), and this one
        may follow `frames_to` it. Raises QueueFull, ImagesFull, RequestConflict.

        The images that the request names are stored before it, as far as this process has them
        (`ImageSpan.data`).

        A request whose state was lost is queued again (ADMITTED), with an attempt above all earlier
        ones, up to MAX_REQUEUES times and not after its deadline; with `polite` this is left to its
        own gateway for LOST_RESERVED_S. With `seen` an abandoned request is queued again too. With
        `disputed` a done request is queued again, too, if this is its gateway and its client has
        tokens of another history than the outcome's. Then the outcome's attempt must not be above
        `seen`, and no other client may have been given the outcome: by `deliver_outcome`, by
        `admit` without `seen`, or as FOLLOWING.
        """

    def frames(self) -> AsyncIterator[Frame]:
        """This gateway's reply stream in order, without end; after a reconnect from its start."""

    async def frames_to(self, gateway_id: str, model: str) -> AsyncIterator[Frame]:
        """Returns the frames that a model's engines send to another gateway, without end.

        They are all frames that are written after this method has returned.
        """

    async def gateway_alive(self, gateway_id: str) -> bool: ...

    async def request_status(self, request_id: str, model: str) -> RequestStatus | None:
        """The state of a request, read only. None if the queue does not know it."""

    async def deliver_outcome(self, request_id: str, model: str) -> RequestStatus | None:
        """Returns the status, and notes that a client was given the outcome if there is one.

        From then on a done outcome cannot be `disputed`.
        """

    async def queue_positions(
        self, request_ids: Sequence[str], model: str
    ) -> list[QueuePosition | None]:
        """The approximate position of each waiting request; None for one that does not wait."""

    async def journal(self, request_id: str, model: str) -> tuple[ChoiceState, ...] | None:
        """Like EngineQueue.journal, for a gateway that takes over another one's request."""

    async def send(self, engine_id: str, model: str, control: Control) -> None:
        """Sends a control message to an engine of a model."""

    async def cancel(self, request_id: str, model: str, given: int | None = None) -> None:
        """Ends a request: a waiting one at once, a running one through its engine. Idempotent.

        `given` is the number of output tokens that its client was given, for the ledger; None: as
        many as the journal has.
        """

    async def note_given(self, request_id: str, model: str, given: int) -> None:
        """Says how many output tokens the client of an ended request was given, if its engine may
        have counted others: the ledger has this number. Idempotent."""

    async def drop_images(self, request: GenerateRequest) -> None:
        """Says that an ended or refused request needs its images no longer. Idempotent.

        An image that no other request names is stored for ENDED_TTL_MS longer.
        """

    async def forget(self, request_ids: Sequence[str], model: str) -> None:
        """Allows Redis to drop the outcomes of ended requests that no client will ask for."""

    async def release(self, request_id: str, model: str, engine_id: str, attempt: int) -> None:
        """Makes a request claimable immediately, if the silent engine `engine_id` still owns it."""

    async def depth(self, model: str) -> QueueDepth: ...

    async def engines(self, model: str) -> Sequence[EngineStatus]: ...

    async def canary_plan(self, model: str) -> CanaryPlan:
        """What is meant for the model's canary."""

    async def drain_rate(self, model: str) -> float:
        """Requests per second that have lately left the queue; 0 if unknown."""

    async def beat(self) -> None:
        """Renews this gateway's lease and its stream."""

    async def close(self) -> None:
        """Ends this gateway's lease."""


class EngineQueue(Protocol):
    """The queue for one incarnation of an engine, which serves one model.

    Raises BackendUnavailable if Redis cannot be reached.
    """

    engine_id: str

    async def start(self) -> None: ...

    def serve_adapters(self, adapters: Collection[str]) -> None:
        """Says which adapters this engine has loaded while it serves (GenerateRequest.adapter).

        From then on, of the requests with a `lora_version`, `take` and `reap` hand out those for
        these adapters and leave the others to other engines.
        """

    def limit(self, bounds: TakeBounds) -> None:
        """Says which requests this engine takes from now on. Initially it takes all."""

    async def engines(self) -> Sequence[EngineStatus]:
        """The statuses of all engines of the model."""

    async def take(
        self, count: int, prompt_tokens: int | None = None, low_priority: int | None = None
    ) -> Sequence[Lease]:
        """Takes at most `count` waiting requests by priority, tenants' shares and age; never waits.

        Among the next requests, those placed with this engine come first, within bounds
        (docs/protocol.md); one that is placed with another engine is left to it for a moment.

        With `prompt_tokens`, stops before the prompts together exceed it: the next request stays
        first in the queue. An idle engine passes None, because a request that does not fit then
        never will. At most `low_priority` of them are of low priority (None: any number); the rest
        of these stay in the queue. Expired, cancelled and superseded entries are ended on the way;
        malformed ones become dead letters and are answered.
        """

    async def image(self, request: GenerateRequest, digest: bytes) -> bytes | None:
        """The encoded bytes of one of a request's images; None if the queue has lost them.

        Raises SealingError.
        """

    async def reap(self, count: int, *, suspects: bool = True) -> Sequence[Lease]:
        """Takes at most `count` requests whose owners stopped beating, with `recovered` set.

        At most one of them is a suspect, and none if `suspects` is False (one is running here).
        Call it with every beat while there is room, and after wait().
        """

    async def wait(self) -> None:
        """Returns when the queue may hold something new to take; blocks on the socket until then.

        A request that the last take() left for lack of `prompt_tokens` is not new: wait for room as
        well. A request that it left to another engine is new once any engine may take it. May
        return early; cancelling it is cheap.
        """

    async def beat(self, progress: Sequence[Progress], status: EngineStatus) -> Mapping[str, Beat]:
        """Renews the leases, writes the journal, publishes the status; one Beat per request_id."""

    async def journal(self, request_id: str) -> tuple[ChoiceState, ...] | None:
        """The known output of a request whose gateway is gone: its journal and later frames.

        None if nothing is known; the client may have received tokens nevertheless.
        """

    async def resume(self, request_id: str, attempt: int, choices: Sequence[ChoiceState]) -> bool:
        """Sets the journal to exactly these tokens, before new ones; False if not the owner."""

    async def publish(self, replies: Mapping[str, Sequence[Reply]]) -> None:
        """Sends one packed frame to each gateway id, in one round trip.

        Safe to repeat after BackendUnavailable. An empty sequence is a keep-alive: send one each
        second to every gateway with a request here that received nothing else, or the gateway
        releases its requests to other engines.
        """

    def controls(self) -> AsyncIterator[Control]:
        """Control messages for this engine, without end; blocks on the socket."""

    async def gateway_alive(self, gateway_id: str) -> bool: ...

    async def finish(
        self,
        request_id: str,
        attempt: int,
        outcome: Outcome,
        usage: AttemptUsage | None = None,
    ) -> bool:
        """Ends a request, stores its outcome and enters its usage in the ledger; False if not the
        owner. Works in a full Redis."""

    async def give_back(
        self,
        request_ids: Sequence[str],
        *,
        for_own_side: bool = False,
        handed_over: bool = False,
    ) -> None:
        """Makes own requests claimable immediately, without counting a failure.

        With `for_own_side` only engines of the side that ran them before get them, as long as that
        side is wanted. `handed_over` says that their KV is in the shared tier: see TakeBounds.
        """

    async def close(self) -> None: ...


class ShardQueue(EngineQueue, Protocol):
    """An engine's queue of one shard, as part of a queue of several shards."""

    shard: int

    @property
    def holds_more(self) -> bool:
        """Whether the last take() left a request: for lack of room, or to another engine."""

    @property
    def lacks_room(self) -> bool:
        """Whether the last take() left a request for lack of room."""

    async def renew(self, progress: Sequence[Progress]) -> Mapping[str, Beat]:
        """Like `beat`, without the engine's status, which is in the first shard."""

    async def tell_shards(self, shards: int) -> int:
        """Notes in the first shard that the engine takes from `shards` shards.

        Returns the number that it should take from, which is larger if other processes have lately
        used more shards: these may hold requests.
        """

    async def tenant_use(self, apart: float) -> TenantUse | None:
        """What tenants have used in this shard; None if that was read less than `apart` seconds
        ago."""

    async def add_tenant_use(self, uses: Mapping[int, TenantUse]) -> None:
        """Adds what tenants have used in other shards, by their numbers, to this shard's counters.

        Only what is new since the last call for the same epoch is added.
        """
