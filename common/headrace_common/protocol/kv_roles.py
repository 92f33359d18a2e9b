"""Says which engine takes which request if different engines compute prompts and answers.

A producer computes prompts and hands their KV over; a consumer goes on with the answers and
computes short prompts itself. An engine of both roles does everything. If one role has no engine
that takes work, the others do everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .base import EngineStatus, TakeBounds


class KVRole(StrEnum):
    """The part of an engine in disaggregated prefill, in vLLM's words."""

    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"
    BOTH = "kv_both"


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the engines of a model say about their roles.

    `computes_prompts` says that an engine takes long prompts, `goes_on` that one takes requests
    that were handed over. Prompts of up to `local_length` tokens are computed by consumers.
    """

    computes_prompts: bool
    goes_on: bool
    local_length: int

    @classmethod
    def of(cls, engines: Sequence[EngineStatus]) -> "Fleet":
        awake = [engine for engine in engines if engine.takes_work]
        others = [engine for engine in awake if engine.kv_role != KVRole.PRODUCER]
        return cls(
            computes_prompts=any(engine.kv_role != KVRole.CONSUMER for engine in awake),
            goes_on=bool(others),
            local_length=min((engine.max_local_prefill_length for engine in others), default=0),
        )

    def bounds(self, engine: EngineStatus, hold: float) -> TakeBounds:
        """What an engine of this fleet takes; for `hold` seconds it leaves the rest to others."""
        if engine.kv_role == KVRole.PRODUCER and self.goes_on:
            return TakeBounds(fewest=self.local_length + 1, handed_over=False, hold=hold)
        if engine.kv_role == KVRole.CONSUMER and self.computes_prompts:
            return TakeBounds(most=engine.max_local_prefill_length, hold=hold)
        return TakeBounds()


def able_to_take(engines: Sequence[EngineStatus], tokens: int) -> list[EngineStatus]:
    """The engines that take new requests with a prompt of `tokens` tokens."""
    fleet = Fleet.of(engines)
    return [
        engine
        for engine in engines
        if engine.takes_work and fleet.bounds(engine, 0.0).includes(tokens)
    ]
