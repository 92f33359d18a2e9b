"""The two sides of a model's engines while it has a canary: which requests each side runs.

A request's side is decided once, by its id. docs/protocol.md has the rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ..wire.messages import GenerateRequest
from .base import EngineStatus

STABLE, CANARY = "", "canary"
"""The variants of engines, and so the sides of requests."""
MAX_PERCENT = 100
COMPARISON_TENANT = "_canary"
"""The tenant of requests that gateways repeat on a canary. No API key can name it."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many answers of a canary were those of the stable engines, and how many were not."""

    equal: int = 0
    different: int = 0

    @property
    def compared(self) -> int:
        return self.equal + self.different

    def since(self, before: "Agreement") -> "Agreement":
        """What was added since `before`; all of it if the counts have begun again."""
        if self.equal < before.equal or self.different < before.different:
            return self
        return Agreement(self.equal - before.equal, self.different - before.different)


@dataclass(slots=True)
class EngineSide:
    """An engine's side, and what it last knew of the other one.

    `weights` is a digest of its weights; "" if that is unknown. `alone`: the other side has no
    engine that takes work. `canary_wanted`: a share of the requests is meant for a canary.
    """

    variant: str = STABLE
    weights: str = ""
    alone: bool = False
    canary_wanted: bool = False


def is_comparison(request: GenerateRequest) -> bool:
    """Whether a gateway made the request itself, to compare a canary's answer."""
    return request.tenant == COMPARISON_TENANT


def drawn(request_id: str, percent: float) -> bool:
    """Whether a request is among the `percent` of all that are the canary's."""
    digest = blake2b(request_id.encode(), digest_size=8, person=b"headrace.canary").digest()
    return int.from_bytes(digest) < percent / MAX_PERCENT * 2**64


def side_of(request_id: str, percent: float, engines: Sequence[EngineStatus]) -> str:
    """The side of a new request.

    It is the canary's if it was drawn and a canary has room: a full one gets no more. A side
    without engines leaves its requests to the other one.
    """
    able = [engine for engine in engines if engine.takes_work]
    canaries = [engine for engine in able if engine.variant == CANARY]
    if not canaries:
        return STABLE
    if len(canaries) == len(able):
        return CANARY
    room = any(engine.running < engine.capacity for engine in canaries)
    return CANARY if room and drawn(request_id, percent) else STABLE
