"""Renders chats by templates that engines registered, in processes that may be killed.

Bounded templates (`headrace_common.text.bounded_templates`) need none: a process costs each chat
more than most templates do.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from headrace_common.pools.fair_slots import FairSlots, SlotsFull
from headrace_common.pools.limited_pool import LimitedPool, TaskKilled, TaskLimits
from headrace_common.text.chat_template import MAX_RENDER_SECONDS, ChatTemplate, ChatTemplateError

from ..errors import busy

WORKERS = 2
LIMITS = TaskLimits(
    timeout=MAX_RENDER_SECONDS + 1, cpu_seconds=int(MAX_RENDER_SECONDS), memory_bytes=256 * 2**20
)
MOST_WAITING = 256
MOST_WAITING_OF_TENANT = 32
MAX_WAIT_S = 3.0
KEPT_TEMPLATES = 16
BUSY = "templates_busy"


class Rendering:
    """Renders chats.

    Use it on one event loop. Processes start with the first chat that needs one.
    """

    def __init__(self, limits: TaskLimits = LIMITS) -> None:
        self._pool = LimitedPool(WORKERS, limits, [__name__])
        self._slots = FairSlots(WORKERS, most=MOST_WAITING, most_of_tenant=MOST_WAITING_OF_TENANT)

    async def render(self, template: ChatTemplate, chat: Mapping[str, Any], tenant: str) -> str:
        """Renders a chat; `chat` has the arguments of ChatTemplate.render.

        Raises ChatTemplateError or ApiError.
        """
        given = (template.source, tuple(template.special_tokens.items()), chat)
        try:
            async with self._slots.hold(tenant, MAX_WAIT_S):
                return await self._pool.run(_render, *given)
        except TaskKilled as killed:
            raise ChatTemplateError(
                f"chat template: rendering exceeded its limit: {killed.reason}"
            ) from killed
        except SlotsFull as full:
            message = "Too many chats wait for their model's template; send it again."
            raise busy(message, code=BUSY, of_tenant=full.tenant) from full

    async def close(self) -> None:
        await self._pool.close()


def _render(source: str, special: tuple[tuple[str, str], ...], chat: Mapping[str, Any]) -> str:
    return _template(source, special).render(**chat)


@lru_cache(KEPT_TEMPLATES)
def _template(source: str, special: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special))
