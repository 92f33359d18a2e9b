"""Signals scraped directly from the metrics ports of gateway and engine pods.

Keeps the last page of counters for rates and the last good signals, whose age tells how stale they
are. Asks no Kubernetes: the caller knows the pods.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from .errors import SignalsUnavailable
from .scaling.observation import QueueSignals
from .signals import (
    Counters,
    Labels,
    PodAddress,
    Samples,
    Signals,
    cached_blocks,
    capacity_of_one,
    engine_counters,
    engine_signals,
    gateway_counters,
    queue_signals,
    rates,
)
from .spec import ModelService

logger = logging.getLogger(__name__)

MAX_PAGE_BYTES = 8 * 2**20
MIN_RATE_WINDOW = 5.0  # seconds; over less, a few requests make a wild rate

Gateways = Callable[[], Awaitable[Sequence[PodAddress]]]


@dataclass(slots=True)
class _Memory:
    """What is remembered of one ModelService."""

    queue: QueueSignals | None = None
    queue_at: float = 0.0
    counters: dict[str, Counters] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)


class ScrapedSignals:
    """A SignalSource. `gateways` lists the gateways' endpoints anew for every reading."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        gateways: Gateways,
        *,
        timeout: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._session = session
        self._gateways = gateways
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._clock = clock
        self._memory: dict[tuple[str, str], _Memory] = {}

    def forget(self, key: tuple[str, str]) -> None:
        self._memory.pop(key, None)

    async def read(self, service: ModelService, pods: Sequence[PodAddress]) -> Signals:
        now = self._clock()
        gateways = await self._gateways()
        pages = await self._pages([*gateways, *pods])
        ours = {a.pod: pages[a.pod] for a in gateways if a.pod in pages}
        engines = {a.pod: pages[a.pod] for a in pods if a.pod in pages}
        memory = self._memory.setdefault(service.key, _Memory())
        model = service.served_name
        self._count(memory, ours, engines, model, now)
        arrivals = memory.rates.get("arrivals") if len(ours) == len(gateways) else None
        queue = queue_signals(ours.values(), model, arrivals)
        if queue is not None:
            memory.queue, memory.queue_at = queue, now
        elif memory.queue is None:
            raise SignalsUnavailable(_why(gateways, ours, model))
        kept = memory.queue if queue is None else queue
        signals = Signals(
            at=memory.queue_at,
            queue=kept,
            engines=engine_signals(
                list(engines.values()),
                model,
                capacity=capacity_of_one(service),
                rates=memory.rates,
            ),
        )
        cached = {pod: cached_blocks(page, model) for pod, page in engines.items()}
        return replace(signals, cached_blocks=cached)

    def _count(
        self,
        memory: _Memory,
        gateways: Mapping[str, Samples],
        engines: Mapping[str, Samples],
        model: str,
        now: float,
    ) -> None:
        """Renews the rates, and what the next ones count from, once the window is long enough."""
        counters = {pod: gateway_counters(page, model, now) for pod, page in gateways.items()}
        counters |= {pod: engine_counters(page, model, now) for pod, page in engines.items()}
        known = [old.at for old in memory.counters.values()]
        if known and now - max(known) < MIN_RATE_WINDOW:
            return
        memory.rates = rates(memory.counters, counters) or {}
        memory.counters = counters

    async def _pages(self, addresses: Iterable[PodAddress]) -> dict[str, Samples]:
        """The pages of those that answered, by pod."""
        wanted = {address.pod: address for address in addresses}
        found = await asyncio.gather(*(self._page(address) for address in wanted.values()))
        return {pod: page for pod, page in zip(wanted, found, strict=True) if page is not None}

    async def _page(self, address: PodAddress) -> Samples | None:
        try:
            async with self._session.get(address.url, timeout=self._timeout) as reply:
                reply.raise_for_status()
                data = await reply.content.read(MAX_PAGE_BYTES)
                return parse(data.decode(errors="replace"))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            text = str(error) or type(error).__name__
            logger.warning("pod not scraped", extra={"pod": address.pod, "error": text})
            return None


def parse(text: str) -> Samples:
    """A page in Prometheus' text format. Raises ValueError where it is none."""
    page: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            page.setdefault(sample.name, []).append((sample.labels, sample.value))
    return page


def _why(gateways: Sequence[PodAddress], answered: Mapping[str, Samples], model: str) -> str:
    if not gateways:
        return "no gateway pod is running"
    if not answered:
        return f"none of {len(gateways)} gateway pods answers on its metrics port"
    return f"no gateway serves a model named {model!r}"
