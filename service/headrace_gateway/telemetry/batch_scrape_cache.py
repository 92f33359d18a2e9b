"""The number of batches, read for metrics."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace_common.protocol.batches import Batch, BatchStatus, is_behind

from .scrape_cache import ScrapeCache

STATES = (
    BatchStatus.VALIDATING.value,
    BatchStatus.IN_PROGRESS.value,
    BatchStatus.FINALIZING.value,
    "cancelling",
)
FINAL_STATES = tuple(status.value for status in BatchStatus if status.final)


@dataclass(frozen=True, slots=True)
class OpenBatches:
    """The batches of all tenants that have not ended. `oldest_age` in seconds. `behind` has the
    number of batches, by model, that are behind the pace that ends them in time."""

    by_state: Mapping[str, int]
    requests_left: int
    oldest_age: float
    behind: Mapping[str, int]


class Batches(Protocol):
    """The part of RedisBatches that is read here."""

    async def all_open(self) -> Sequence[Batch]: ...


def summed_up(batches: Sequence[Batch], now: float) -> OpenBatches:
    """Counts batches by state; every state is listed, also without a batch."""
    states = Counter(batch.state for batch in batches)
    oldest = min((batch.request.created_at for batch in batches), default=now)
    return OpenBatches(
        by_state={state: states[state] for state in STATES},
        requests_left=sum(batch.left for batch in batches),
        oldest_age=max(0.0, now - oldest),
        behind=Counter(
            model for batch in batches if _is_behind(batch, now) for model in batch.progress.models
        ),
    )


def _is_behind(batch: Batch, now: float) -> bool:
    request, progress = batch.request, batch.progress
    return is_behind(
        created=request.created_at,
        expires=request.expires_at,
        now=now,
        total=progress.total,
        done=progress.completed + progress.failed,
    )


class BatchScrapeCache(ScrapeCache[Sequence[OpenBatches]]):
    """One value, or none while Redis does not answer. `clock` gives Unix seconds of Redis."""

    def __init__(
        self,
        batches: Batches,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        async def read() -> Sequence[OpenBatches]:
            return [summed_up(await batches.all_open(), clock())]

        super().__init__(read, (), loop)
