"""Routes requests to engines that likely have the beginning of their prompts cached.

Uses what the engines reported last. Never refuses or delays a request: without a better choice any
engine may take it.
"""

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.base import Placement
from headrace_common.protocol.prefix_routing import placement_of
from headrace_common.wire.messages import GenerateRequest

from .engines import EngineDirectory


class PrefixRouter:
    """Routes by the first `prefix_tokens` tokens of a prompt and by its cache salt.

    `load_factor`: as in Placement. `steal_after`: seconds that a request waits for its engine.
    """

    def __init__(
        self,
        engines: EngineDirectory,
        *,
        prefix_tokens: int,
        load_factor: float,
        steal_after: float,
    ) -> None:
        self._engines = engines
        self._prefix_tokens = prefix_tokens
        self._load_factor = load_factor
        self._hold_ms = int(steal_after * 1000)

    async def place(self, request: GenerateRequest) -> Placement | None:
        try:
            engines = await self._engines.engines(request.model)
        except BackendUnavailable:
            return None
        return placement_of(
            request,
            engines,
            prefix_tokens=self._prefix_tokens,
            load_factor=self._load_factor,
            hold_ms=self._hold_ms,
        )
