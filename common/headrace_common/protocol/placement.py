"""Which engine likely has the beginning of a prompt in its prefix cache, and how a request says so.

Rendezvous hashing: gateways that see the same engines come to the same order of them without
talking, and an engine that comes or goes moves its own prompts only. Knows no queue and no tokens'
meaning; the queue's scripts choose among the engines by their load.
"""

from collections.abc import Sequence
from hashlib import blake2b

from ..keys import shard_of
from ..messages import GenerateRequest, pack_tokens
from .base import Choice, EngineStatus, Placement
from .shards import shards_of

MOST_CHOICES = 8  # engines that a request names: behind so many it is anybody's


def prefix_key(request: GenerateRequest, tokens: int) -> bytes:
    """Equal for requests whose first `tokens` tokens, salt and adapter are, which could share a
    cache."""
    digest = blake2b(digest_size=16)
    digest.update(len(request.cache_salt).to_bytes(4, "little") + request.cache_salt)
    if request.lora is not None:
        digest.update(request.lora.encode())
    digest.update(pack_tokens(request.prompt_token_ids[:tokens]))
    return digest.digest()


def ranked(key: bytes, engines: Sequence[EngineStatus]) -> list[EngineStatus]:
    """The engines in this key's order: that of the highest random weight (Thaler and Ravishankar,
    1998)."""

    def weight(engine: EngineStatus) -> bytes:
        return blake2b(engine.engine_id.encode(), digest_size=8, key=key).digest()

    return sorted(engines, key=weight, reverse=True)


def placement_of(
    request: GenerateRequest,
    engines: Sequence[EngineStatus],
    *,
    prefix_tokens: int,
    load_factor: float,
    hold_ms: int,
) -> Placement | None:
    """Where a request is best placed; None where there is no choice between engines."""
    shard = shard_of(request.request_id)
    able = [engine for engine in engines if not engine.draining and shard < engine.shards]
    if len(able) < 2:
        return None
    best = ranked(prefix_key(request, prefix_tokens), able)[:MOST_CHOICES]
    return Placement(
        choices=tuple(Choice(engine_id=e.engine_id, capacity=e.capacity) for e in best),
        capacity=sum(engine.capacity for engine in able),
        load_factor=load_factor,
        hold_ms=hold_ms,
        shards=shards_of(engines),
    )
