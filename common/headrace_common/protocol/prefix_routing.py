"""Finds the engines that likely have the beginning of a prompt in their prefix caches.

Rendezvous hashing: gateways that see the same engines compute the same order without communicating,
and when an engine starts or ends, only its own prompts move. The queue's scripts then choose among
these engines by their load.
"""

from collections.abc import Sequence
from hashlib import blake2b

from ..wire.keys import shard_of
from ..wire.messages import GenerateRequest, pack_tokens
from .base import Candidate, EngineStatus, Placement
from .kv_roles import able_to_take
from .shards import shards_of

MAX_CANDIDATES = 8  # engines that a request names; if all are too busy, any engine takes it


def prefix_key(request: GenerateRequest, tokens: int) -> bytes:
    """A key that is equal for requests with the same first `tokens` tokens, salt and adapter.

    Such requests could share a prefix cache. Images that begin within these tokens are part of the
    key, since the tokens that stand for them are the same for all images.
    """
    digest = blake2b(digest_size=16)
    digest.update(len(request.cache_salt).to_bytes(4, "little") + request.cache_salt)
    if request.adapter is not None:
        digest.update(request.adapter.encode())
    digest.update(pack_tokens(request.prompt_token_ids[:tokens]))
    for image in request.images:
        if image.start < tokens:
            digest.update(image.digest)
    return digest.digest()


def ranked(key: bytes, engines: Sequence[EngineStatus]) -> list[EngineStatus]:
    """The engines by highest random weight for this key (Thaler and Ravishankar, 1998)."""

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
    """The best placement of a request; None if fewer than two engines of its side can
    take it."""
    shard = shard_of(request.request_id)
    able = [engine for engine in engines if engine.takes_work and shard < engine.shards]
    of_side = [engine for engine in engines if engine.variant == request.variant]
    takers = able_to_take(of_side, len(request.prompt_token_ids))
    own_side = [engine for engine in takers if shard < engine.shards]
    if len(own_side) < 2:
        return None
    best = ranked(prefix_key(request, prefix_tokens), own_side)[:MAX_CANDIDATES]
    return Placement(
        candidates=tuple(Candidate(engine_id=e.engine_id, capacity=e.capacity) for e in best),
        capacity=sum(engine.capacity for engine in able),
        load_factor=load_factor,
        hold_ms=hold_ms,
        shards=shards_of(engines),
    )
