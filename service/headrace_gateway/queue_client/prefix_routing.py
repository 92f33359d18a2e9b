"""Routes requests to engines that likely have the beginning of their prompts cached.

Uses what the engines reported last. Never refuses a request: without a better choice any engine may
take it.
"""

import asyncio
from collections import Counter

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.base import Placement
from headrace_common.protocol.prefix_match import PrefixMatch
from headrace_common.protocol.prefix_routing import placement_of
from headrace_common.wire.messages import GenerateRequest

from .cached_prefixes import CachedPrefixes
from .engines import EngineDirectory

INLINE_BLOCKS = 16  # blocks that are hashed on the event loop; those after them in a thread


class PrefixRouter:
    """Routes by what engines have cached of a prompt; where that is less than `prefix_tokens`
    tokens, by these tokens and the cache salt.

    `load_factor`: as in Placement. `steal_after`: seconds that a request waits for its engine.
    `tokens` counts tokens of placed prompts by model and kind: prompt (all), known (some engine was
    believed to have them cached), expected (the engine that took the request first was), found (it
    had them).
    """

    def __init__(
        self,
        engines: EngineDirectory,
        cached: CachedPrefixes,
        *,
        prefix_tokens: int,
        load_factor: float,
        steal_after: float,
    ) -> None:
        self._engines = engines
        self._cached = cached
        self._prefix_tokens = prefix_tokens
        self._load_factor = load_factor
        self._hold_ms = int(steal_after * 1000)
        self.tokens: Counter[tuple[str, str]] = Counter()

    async def place(self, request: GenerateRequest) -> Placement | None:
        try:
            engines = await self._engines.engines(request.model)
        except BackendUnavailable:
            return None
        if len(engines) < 2:
            return None
        filters = await self._cached.filters(request.model, (e.engine_id for e in engines))
        match = PrefixMatch(request, filters)
        if not match.advance(INLINE_BLOCKS):
            await asyncio.to_thread(match.advance)
        return placement_of(
            request,
            engines,
            prefix_tokens=self._prefix_tokens,
            load_factor=self._load_factor,
            hold_ms=self._hold_ms,
            cached=match.tokens,
        )

    def taken(
        self, request: GenerateRequest, placement: Placement, engine_id: str, cached_tokens: int
    ) -> None:
        """Counts what a placed request's first engine had cached."""
        believed = {each.engine_id: each.cached_tokens for each in placement.candidates}
        counts = {
            "prompt": len(request.prompt_token_ids),
            "known": max(believed.values()),
            "expected": believed.get(engine_id, 0),
            "found": cached_tokens,
        }
        for kind, count in counts.items():
            self.tokens[request.model, kind] += count
