"""Signals scraped directly from the metrics ports of gateway and engine pods.

Keeps the last counters for rates, and the last valid signals with their time. It does not ask
Kubernetes: the caller knows the pods.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ..errors import SignalsUnavailable
from ..scaling.observation import QueueSignals
from ..spec.model_service import ModelService
from . import canary_metrics, fetch
from .signals import (
    MODEL_LABEL,
    SAMPLE_NAMES,
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

logger = logging.getLogger(__name__)

PAGES_AT_ONCE = 8  # in one reading; pages may be large, and pods are not trusted
MAX_SAMPLES = 10_000  # of one model in one page
_WANTED = SAMPLE_NAMES | canary_metrics.SAMPLE_NAMES
MIN_RATE_WINDOW = 5.0  # seconds; in a shorter window a few requests give an extreme rate

Gateways = Callable[[], Awaitable[Sequence[PodAddress]]]


@dataclass(slots=True)
class _Memory:
    """The last counters and signals of one ModelService."""

    queue: QueueSignals | None = None
    queue_at: float = 0.0
    counters: dict[str, Counters] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)


class ScrapedSignals:
    """A SignalSource. `gateways` lists the gateways' endpoints again for every reading.

    A page above `page_limit` bytes is refused, since a part of it would look like a smaller load.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        gateways: Gateways,
        *,
        timeout: float,
        page_limit: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._session = session
        self._gateways = gateways
        self._page_limit = page_limit
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._clock = clock
        self._memory: dict[tuple[str, str], _Memory] = {}

    def forget(self, key: tuple[str, str]) -> None:
        self._memory.pop(key, None)

    async def read(self, service: ModelService, pods: Sequence[PodAddress]) -> Signals:
        now = self._clock()
        gateways = await self._gateways()
        model = service.served_name
        pages, problems = await self._pages([*gateways, *pods], model)
        ours = {a.pod: pages[a.pod] for a in gateways if a.pod in pages}
        engines = {a.pod: pages[a.pod] for a in pods if a.pod in pages}
        memory = self._memory.setdefault(service.key, _Memory())
        self._count(memory, ours, engines, now)
        arrivals = memory.rates.get("arrivals") if len(ours) == len(gateways) else None
        queue = queue_signals(ours.values(), arrivals, memory.rates.get("low_arrivals"))
        if queue is not None:
            memory.queue, memory.queue_at = queue, now
        elif memory.queue is None:
            raise SignalsUnavailable(_why(gateways, ours, problems, model))
        kept = memory.queue if queue is None else queue
        signals = Signals(
            at=memory.queue_at,
            queue=kept,
            engines=engine_signals(
                list(engines.values()), capacity=capacity_of_one(service), rates=memory.rates
            ),
        )
        cached = {pod: cached_blocks(page) for pod, page in engines.items()}
        return replace(signals, cached_blocks=cached, problem=next(iter(problems.values()), None))

    def _count(
        self,
        memory: _Memory,
        gateways: Mapping[str, Samples],
        engines: Mapping[str, Samples],
        now: float,
    ) -> None:
        """Computes new rates, and starts a new window, once the present one is long enough."""
        counters = {pod: gateway_counters(page, now) for pod, page in gateways.items()}
        counters |= {pod: engine_counters(page, now) for pod, page in engines.items()}
        known = [old.at for old in memory.counters.values()]
        if known and now - max(known) < MIN_RATE_WINDOW:
            return
        memory.rates = rates(memory.counters, counters)
        memory.counters = counters

    async def pages(self, model: str, pods: Sequence[PodAddress]) -> dict[str, Samples]:
        """The metrics of the pods that answer, by pod."""
        pages, _ = await self._pages(pods, model)
        return pages

    async def _pages(
        self, addresses: Iterable[PodAddress], model: str
    ) -> tuple[dict[str, Samples], dict[str, str]]:
        """Returns the pages by pod, and the reasons why other pods gave none, by pod."""
        wanted = {address.pod: address for address in addresses}
        places = asyncio.Semaphore(PAGES_AT_ONCE)
        found = await asyncio.gather(
            *(self._page(address, model, places) for address in wanted.values())
        )
        pages = {pod: page for pod, page in zip(wanted, found, strict=True)}
        return (
            {pod: page for pod, page in pages.items() if not isinstance(page, str)},
            {pod: page for pod, page in pages.items() if isinstance(page, str)},
        )

    async def _page(
        self, address: PodAddress, model: str, places: asyncio.Semaphore
    ) -> Samples | str:
        """A pod's page, or the reason why there is none."""
        request = self._session.get(address.url, timeout=self._timeout, allow_redirects=False)
        try:
            async with places:
                data = await fetch.body(request, self._page_limit)
                return await asyncio.to_thread(parse, data.decode(errors="replace"), model)
        except SignalsUnavailable as error:
            logger.warning(
                "metrics of a pod not read", extra={"pod": address.pod, "error": str(error)}
            )
            return f"metrics page of pod {address.pod}: {error}"


def parse(text: str, model: str) -> Samples:
    """Reads the metrics for signals from Prometheus' text format. Raises SignalsUnavailable."""
    page: dict[str, list[tuple[Labels, float]]] = {}
    count = 0
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if _is_wanted(sample, model):
                    page.setdefault(sample.name, []).append((sample.labels, sample.value))
                    count += 1
            if count > MAX_SAMPLES:
                raise SignalsUnavailable(f"over {MAX_SAMPLES} samples of one model")
    except ValueError:
        raise SignalsUnavailable("it is not in Prometheus' text format") from None
    return page


def _is_wanted(sample: Sample, model: str) -> bool:
    return (
        sample.name in _WANTED
        and sample.labels.get(MODEL_LABEL) == model
        and math.isfinite(sample.value)
    )


def _why(
    gateways: Sequence[PodAddress],
    answered: Mapping[str, Samples],
    problems: Mapping[str, str],
    model: str,
) -> str:
    if not gateways:
        return "no gateway pod is running"
    if not answered:
        first = problems[gateways[0].pod]
        return f"none of {len(gateways)} gateway pods gives its metrics ({first})"
    return f"no gateway serves a model named {model!r}"
