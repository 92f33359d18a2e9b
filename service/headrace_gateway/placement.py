"""Where requests are placed: with an engine that likely has their prompts' beginnings cached.

Knows the engines as far as they have told lately. Never refuses or delays a request: where it knows
no better, any engine may take it.
"""

from headrace_common.errors import BackendUnavailable
from headrace_common.messages import GenerateRequest
from headrace_common.protocol.base import Placement
from headrace_common.protocol.placement import placement_of

from .engines import EngineDirectory


class Placer:
    """Places by the first `prefix_tokens` tokens of a prompt and its cache's salt.

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
