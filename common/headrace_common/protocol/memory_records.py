"""What the queue in memory knows of a request, and what it hands out."""

import math
from dataclasses import dataclass, field

from ..errors import FailureCode
from ..messages import ChoiceState
from .base import Outcome


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
    beaten: float = -math.inf  # when its owner last beat; -inf: claimable at once
    outcome: Outcome | None = None
    why: FailureCode | None = None
    expires: float = math.inf
    keep: float = 0.0
    consumer: str = ""  # who took it last, also where that has given it back
    placed: str = ""  # with which engine
    hold: float = 0.0  # how long it waits for that
    passes: int = 0

    @property
    def ended(self) -> bool:
        return self.state in ("done", "failed", "cancelled")


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


@dataclass(frozen=True, slots=True)
class Ending:
    """A request that the queue ended."""

    request_id: str
    attempt: int
    gateway: str
    why: FailureCode
