"""Finds the engines that likely have the beginning of a prompt in their prefix caches.

First come the engines that are believed to have most of it, by what they tell (kv_events). Among
equal ones, and while none is known to have it, rendezvous hashing decides: gateways that see the
same engines compute the same order without communicating, and when an engine starts or ends, only
its own prompts move. The queue's scripts then choose among these engines by their load.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from types import MappingProxyType

from ..wire.keys import shard_of
from ..wire.messages import GenerateRequest, pack_tokens
from .base import Candidate, EngineStatus, Placement
from .kv_roles import able_to_take
from .shards import shards_of

MAX_CANDIDATES = 8  # engines that a request names; if all are too busy, any engine takes it


_NOTHING: Mapping[str, int] = MappingProxyType({})


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


def _best(
    request: GenerateRequest,
    engines: Sequence[EngineStatus],
    prefix_tokens: int,
    cached: Mapping[str, int],
) -> list[EngineStatus]:
    """The first MAX_CANDIDATES engines, those with most of the prompt first.

    Less than `prefix_tokens` count as nothing: that much is common to many prompts. Engines with
    the same beginning are ordered by what follows it, so prompts that part there are spread over
    these engines.
    """

    def matched(engine: EngineStatus) -> int:
        tokens = cached.get(engine.engine_id, 0)
        return tokens if tokens >= prefix_tokens else 0

    best: list[EngineStatus] = []
    for tokens, equal in groupby(sorted(engines, key=matched, reverse=True), matched):
        best += ranked(prefix_key(request, tokens + prefix_tokens), list(equal))
        if len(best) >= MAX_CANDIDATES:
            break
    return best[:MAX_CANDIDATES]


def placement_of(
    request: GenerateRequest,
    engines: Sequence[EngineStatus],
    *,
    prefix_tokens: int,
    load_factor: float,
    hold_ms: int,
    cached: Mapping[str, int] = _NOTHING,
) -> Placement | None:
    """The best placement of a request; None if fewer than two engines of its side can take it.

    `cached` has for engine ids the leading tokens of the prompt that they are believed to have.
    """
    shard = shard_of(request.request_id)
    able = [engine for engine in engines if engine.takes_work and shard < engine.shards]
    of_side = [engine for engine in engines if engine.variant == request.variant]
    takers = able_to_take(of_side, len(request.prompt_token_ids))
    own_side = [engine for engine in takers if shard < engine.shards]
    if len(own_side) < 2:
        return None
    candidates = tuple(
        Candidate(
            engine_id=engine.engine_id,
            capacity=engine.capacity,
            cached_tokens=cached.get(engine.engine_id, 0),
        )
        for engine in _best(request, own_side, prefix_tokens, cached)
    )
    return Placement(
        candidates=candidates,
        capacity=sum(engine.capacity for engine in able),
        load_factor=load_factor,
        hold_ms=hold_ms,
        shards=shards_of(engines),
    )
