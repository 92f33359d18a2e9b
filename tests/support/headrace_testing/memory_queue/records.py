"""Records of requests in the queue in memory, and the leases that are made from them."""

import math
from dataclasses import dataclass, field

from headrace_common.errors import FailureCode
from headrace_common.protocol.base import MAX_REQUEUES, Outcome, Progress
from headrace_common.protocol.failures import UNDECIDED
from headrace_common.protocol.ledger import AttemptUsage
from headrace_common.wire.keys import GRACE_MS
from headrace_common.wire.messages import ChoiceState


@dataclass(slots=True)
class Record:
    """One request's state; the fields are those of keys.ShardKeys.record. Times in seconds."""

    payload: bytes
    fingerprint: bytes
    priority: int
    deadline: float
    tokens: int
    prompt_tokens: int
    tenant: str
    weight: float
    gateway: str
    admitted: float
    attempt: int = 0
    state: str = "queued"
    owner: str = ""
    former: list[str] = field(default_factory=list)
    writer: str = ""
    journal: list[ChoiceState] = field(default_factory=list)
    failures: int = 0
    progress: int = 0
    progress_at_take: int = 0
    executing: bool = False
    beaten: float = -math.inf  # the time of its owner's last beat; -inf: claimable at once
    outcome: Outcome | None = None
    why: FailureCode | None = None
    expires: float = math.inf
    keep: float = 0.0
    consumer: str = ""  # the engine that took it last, even if it has given it back
    placed: str = ""  # the engine with which it is placed
    hold: float = 0.0  # how long it waits for that engine
    passes: int = 0
    lost_at: float = -math.inf
    anew: int = 0  # how often it was queued again after its end
    required: str = ""  # the adapter that its engine must have loaded
    variant: str = ""  # its side
    weights: str = ""  # of the engine that runs it
    left_to_side: bool = False  # whether only engines with these weights may continue it
    handed_over_at: float = -math.inf  # when an engine gave it back with its KV in the shared tier
    given: bool = False  # whether a client was given its outcome
    key: str = ""
    adapter: str = ""
    entered: bool = True  # whether its usage is entered in the ledger
    entries: int = 0
    sums: tuple[int, ...] = (0, 0, 0, 0, 0)  # of its entries
    given_tokens: int | None = None  # as its gateway says
    usage: dict[int, AttemptUsage] = field(default_factory=dict)  # by attempt

    @property
    def ended(self) -> bool:
        return self.state in ("done", "failed", "cancelled")

    @property
    def undecided(self) -> bool:
        """Whether the request has ended without a final outcome."""
        return self.ended and self.why in UNDECIDED

    def goes_on(self, gateway: str, seen: int | None, *, disputed: bool) -> bool:
        """Whether the request is queued again although it has ended, for a gateway that has it."""
        known = seen is not None and self.attempt <= seen and self.gateway == gateway
        other = disputed and known and self.state == "done" and not self.given
        lost = self.undecided and (self.why is FailureCode.LOST or seen is not None)
        return (lost or other) and self.anew < MAX_REQUEUES

    def go_on(
        self, gateway: str, payload: bytes, now: float, seen: int | None, left: float
    ) -> None:
        """Queues the request again, with an attempt above all earlier ones. Its failures still
        count."""
        self.state, self.why, self.outcome = "queued", None, None
        self.attempt = max(self.attempt, seen or 0)
        self.owner, self.gateway, self.former = "", gateway, []
        self.writer, self.journal, self.executing = "", [], False
        self.progress = self.progress_at_take = 0
        self.placed, self.passes = "", 0
        self.given_tokens = None
        self.payload, self.admitted, self.anew = payload, now, self.anew + 1
        self.expires = now + left + GRACE_MS / 1000

    @property
    def counted_failures(self) -> int:
        """The number of failures, including that of an owner that fell silent while the request
        ran."""
        if not self.executing:
            return self.failures
        return 0 if self.progress > self.progress_at_take else self.failures + 1

    def write_journal(self, item: Progress) -> tuple[int, ...]:
        """Writes progress to the journal; returns the number of tokens of each choice."""
        while len(self.journal) < len(item.choices):
            self.journal.append(ChoiceState())
        for number, (index, choice) in enumerate(zip(item.journaled, item.choices, strict=True)):
            if index <= len(self.journal[number].token_ids):
                self.journal[number] = _extended(self.journal[number], index, choice)
        counts = tuple(len(choice.token_ids) for choice in self.journal)
        self.progress = max(self.progress, sum(counts))
        return counts


def _extended(known: ChoiceState, index: int, new: ChoiceState) -> ChoiceState:
    """The journal's state of a choice, extended by new tokens that begin at `index`."""
    known_count = len(known.token_ids) - index
    logprobs = None
    if new.logprobs is not None and (known.logprobs is not None or not known.token_ids):
        logprobs = (known.logprobs or ()) + new.logprobs[known_count:]
    ended = known if new.finish_reason is None else new
    return ChoiceState(
        token_ids=known.token_ids + new.token_ids[known_count:],
        finish_reason=ended.finish_reason,
        stop_token=ended.stop_token,
        logprobs=logprobs,
    )


@dataclass(frozen=True, slots=True)
class Taken:
    """A lease before its payload is decoded."""

    request_id: str
    attempt: int
    gateway: str
    recovered: bool
    suspect: bool
    payload: bytes
    placed: bool | None
    waited: float
    left: float
    foreign: bool = False
    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """A request that the queue has ended."""

    request_id: str
    attempt: int
    gateway: str
    why: FailureCode
