"""The metrics of a gateway: requests as its clients see them, and the queue.

Callers report what happened; nothing is decided here. Names, units and buckets are in
headrace_common.observability.metric_names. Labels are closed sets: never ids or prompts, and
tenants only if they are configured.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from opentelemetry.metrics import Meter, Observation

from headrace_common.config.api_keys import DEFAULT_TENANT
from headrace_common.observability import metric_names as names
from headrace_common.observability.instruments import (
    counter,
    histogram,
    observed_counter,
    observed_gauge,
    up_down_counter,
)
from headrace_common.protocol.base import QueueDepth
from headrace_common.structured.grammar_checks import CheckResult

from ..limits.api_keys import KeyRing
from ..limits.tenant_stores import TenantStores
from ..limits.tenants import MAX_LABELS, TenantLabels
from ..queue_client.canary_comparisons import ComparisonResult
from .batch_scrape_cache import FINAL_STATES, BatchScrapeCache
from .scrape_cache import ScrapeCache


class RejectReason(StrEnum):
    """Why a request was refused."""

    QUEUE_FULL = "queue_full"
    TENANT_LIMIT = "tenant_limit"
    RATE_LIMIT = "rate_limit"
    BACKEND_UNAVAILABLE = "backend_unavailable"


class ImageResult(StrEnum):
    """What became of an image that a client sent or named."""

    DECODED = "decoded"
    KNOWN = "known"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedRequest:
    """One request as its client saw it. Times in seconds since its arrival, by a monotonic clock.

    `time_to_first_token` is None if no token came. `token_spans` has for each choice its output
    tokens and the seconds between its first and its last token. `error_type` is the error's code,
    None for success.
    """

    model: str
    operation: str
    duration: float
    input_tokens: int
    token_spans: Sequence[tuple[int, float]]
    time_to_first_token: float | None = None
    error_type: str | None = None
    tenant: str | None = None


class GatewayMetrics:
    """The gateway's instruments. Every method is cheap and may be called on the event loop.

    `tenant` is None if API keys are off.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._tenants = TenantLabels()
        self._duration = histogram(meter, names.REQUEST_DURATION)
        self._first_token = histogram(meter, names.TIME_TO_FIRST_TOKEN)
        self._per_token = histogram(meter, names.TIME_PER_OUTPUT_TOKEN)
        self._usage = histogram(meter, names.TOKEN_USAGE)
        self._admitted = counter(meter, names.QUEUE_ADMITTED)
        self._low_admitted = counter(meter, names.QUEUE_LOW_PRIORITY_ADMITTED)
        self._rejected = counter(meter, names.QUEUE_REJECTED)
        self._disconnects = counter(meter, names.GATEWAY_DISCONNECTS)
        self._in_flight = up_down_counter(meter, names.GATEWAY_REQUESTS_IN_FLIGHT)
        self._unauthorized = counter(meter, names.GATEWAY_UNAUTHORIZED)
        self._refused_open = counter(meter, names.GATEWAY_OPEN_REFUSED)
        self._batch_requests = counter(meter, names.BATCH_REQUESTS)
        self._batches_ended = counter(meter, names.BATCH_ENDED)
        self._grammar_checks = counter(meter, names.GATEWAY_GRAMMAR_CHECKS)
        self._images = counter(meter, names.GATEWAY_IMAGES)
        self._comparisons = counter(meter, names.GATEWAY_CANARY_COMPARISONS)
        self._first_difference = histogram(meter, names.GATEWAY_CANARY_FIRST_DIFFERENCE)

    def admitted(
        self, model: str, tenant: str | None = None, *, low_priority: bool = False
    ) -> None:
        attributes = self._of(tenant, {names.REQUEST_MODEL: model})
        self._admitted.add(1, attributes)
        if low_priority:
            self._low_admitted.add(1, attributes)

    def rejected(self, model: str, reason: RejectReason, tenant: str | None = None) -> None:
        attributes = {names.REQUEST_MODEL: model, names.REASON: reason.value}
        self._rejected.add(1, self._of(tenant, attributes))

    def unauthorized(self) -> None:
        """Counts a request without a valid key."""
        self._unauthorized.add(1)

    def refused_open(self, tenant: str) -> None:
        """Counts a request of a tenant that has too many open ones."""
        self._refused_open.add(1, self._of(tenant, {}))

    def grammar_checked(self, result: CheckResult) -> None:
        """Counts the check of a constraint that was not known to be good before."""
        self._grammar_checks.add(1, {names.RESULT: result.value})

    def image_read(self, result: ImageResult) -> None:
        """Counts an image of a request or of an upload."""
        self._images.add(1, {names.RESULT: result.value})

    def compared(
        self, model: str, result: ComparisonResult, first_difference: int | None = None
    ) -> None:
        """Counts an answer that was compared with a canary's."""
        labels = {names.REQUEST_MODEL: model}
        self._comparisons.add(1, {**labels, names.RESULT: result.value})
        if first_difference is not None:
            self._first_difference.record(first_difference, labels)

    def batch_request(self, *, answered: bool) -> None:
        """Counts the first result of a batch's request."""
        result = "completed" if answered else "failed"
        self._batch_requests.add(1, {names.RESULT: result})

    def batch_ended(self, state: str) -> None:
        """Counts the end of a batch, once."""
        self._batches_ended.add(1, {names.STATE: state})

    def disconnected(self, model: str) -> None:
        """Counts a client that left before the end."""
        self._disconnects.add(1, {names.REQUEST_MODEL: model})

    def started(self, model: str, *, stream: bool, tenant: str | None = None) -> None:
        """Counts a request that is being served; pair it with `stopped`."""
        self._in_flight.add(1, self._of(tenant, _flight(model, stream)))

    def stopped(self, model: str, *, stream: bool, tenant: str | None = None) -> None:
        self._in_flight.add(-1, self._of(tenant, _flight(model, stream)))

    def completed(self, request: CompletedRequest) -> None:
        """Records durations and tokens of a request that ended, well or not."""
        attributes = {
            names.OPERATION_NAME: request.operation,
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_MODEL: request.model,
        }
        labels = self._of(request.tenant, attributes)
        ended = labels
        if request.error_type is not None:
            ended = {**labels, names.ERROR_TYPE: request.error_type}
        self._duration.record(request.duration, ended)
        if request.input_tokens:  # a refused request used no tokens
            self._record_tokens(request, labels)
        if request.time_to_first_token is not None:
            self._first_token.record(request.time_to_first_token, labels)
        for tokens, seconds in request.token_spans:
            if tokens > 1:
                self._per_token.record(seconds / (tokens - 1), attributes)

    def _record_tokens(self, request: CompletedRequest, attributes: Mapping[str, str]) -> None:
        output = sum(tokens for tokens, _ in request.token_spans)
        self._usage.record(request.input_tokens, {**attributes, names.TOKEN_TYPE: "input"})
        self._usage.record(output, {**attributes, names.TOKEN_TYPE: "output"})

    def _of(self, tenant: str | None, attributes: Mapping[str, str]) -> Mapping[str, str]:
        if tenant is None:
            return attributes
        return {**attributes, names.TENANT_LABEL: self._tenants.label(tenant)}

    def observe_keys(self, keys: "Keys") -> None:
        """Exports the number of keys and whether they match their file. Call once."""
        observed_gauge(
            self._meter, names.GATEWAY_API_KEYS, lambda: [Observation(len(keys.ring.keys))]
        )
        observed_gauge(
            self._meter,
            names.GATEWAY_API_KEYS_CURRENT,
            lambda: [Observation(int(keys.failing is None))],
        )

    def observe_queue(self, cache: "QueueScrapeCache") -> None:
        """Exports the queues' depths, which are read only at a scrape. Call once."""
        for metric, value in _DEPTH_VALUES:
            observed_gauge(self._meter, metric, _observer(cache, value))
        letters = _observer(cache, lambda depth: depth.dead_letters)
        observed_counter(self._meter, names.QUEUE_DEAD_LETTERS, letters)

    def observe_placement(self, tokens: Mapping[tuple[str, str], int]) -> None:
        """Exports the tokens of placed prompts, counted by model and kind. Call once."""
        observed_counter(
            self._meter,
            names.GATEWAY_PLACEMENT_TOKENS,
            lambda: [
                Observation(count, {names.REQUEST_MODEL: model, names.KIND: kind})
                for (model, kind), count in list(tokens.items())
            ],
        )

    def observe_batches(self, cache: BatchScrapeCache) -> None:
        """Exports the open batches, which are read only at a scrape. Call once."""
        for state in FINAL_STATES:  # without this, the first count would not show as an increase
            self._batches_ended.add(0, {names.STATE: state})
        for result in ("completed", "failed"):
            self._batch_requests.add(0, {names.RESULT: result})
        observed_gauge(self._meter, names.BATCH_OPEN, lambda: _states(cache))
        observed_gauge(
            self._meter,
            names.BATCH_REQUESTS_LEFT,
            lambda: [Observation(each.requests_left) for each in cache.current()],
        )
        observed_gauge(
            self._meter,
            names.BATCH_OLDEST_AGE,
            lambda: [Observation(each.oldest_age) for each in cache.current()],
        )
        observed_gauge(
            self._meter,
            names.BATCH_BEHIND,
            lambda: [
                Observation(count, {names.REQUEST_MODEL: model})
                for each in cache.current()
                for model, count in each.behind.items()
            ],
        )

    def observe_stores(
        self, read: Callable[[], Iterable[tuple[str | None, int]]], most: int
    ) -> None:
        """Exports each tenant's stored bytes and their limit, read only at a scrape. Call once."""
        observed_gauge(self._meter, names.STORE_LIMIT, lambda: [Observation(most)])
        observed_gauge(
            self._meter,
            names.STORE_USED,
            lambda: [Observation(size, self._of(tenant, {})) for tenant, size in read()],
        )


class Keys(Protocol):
    """The part of a KeyFile that is read here."""

    @property
    def ring(self) -> KeyRing: ...
    @property
    def failing(self) -> str | None: ...


class Depths(Protocol):
    """The part of a GatewayQueue that is read here."""

    async def depth(self, model: str) -> QueueDepth: ...


class Queues(Protocol):
    """The models that have queues."""

    @property
    def queues(self) -> Iterable[str]: ...

    @property
    def removed(self) -> Iterable[str]: ...

    def forget(self, model: str) -> None: ...


class QueueScrapeCache(ScrapeCache[Mapping[str, QueueDepth]]):
    """The depths of the queues by model: of served models, and of removed ones still in Redis."""

    def __init__(
        self,
        queue: Depths,
        models: Queues,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        async def read() -> Mapping[str, QueueDepth]:
            found = {model: await queue.depth(model) for model in models.queues}
            for model in models.removed:
                depth = await queue.depth(model)
                if depth.waiting or depth.pending:
                    found[model] = depth
                else:
                    models.forget(model)
            return found

        super().__init__(read, {}, loop, clock)


class StoreScrapeCache(ScrapeCache[Sequence[tuple[str | None, int]]]):
    """Stored bytes by tenant; if API keys are off, of the one without a name."""

    def __init__(
        self,
        stores: TenantStores,
        tenants: Callable[[], Collection[str]] | None,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        async def read() -> Sequence[tuple[str | None, int]]:
            if tenants is None:
                return [(None, await stores.used(DEFAULT_TENANT))]
            return [
                (tenant, await stores.used(tenant)) for tenant in sorted(tenants())[:MAX_LABELS]
            ]

        super().__init__(read, (), loop, clock)


_DEPTH_VALUES: tuple[tuple[names.Metric, Callable[[QueueDepth], float]], ...] = (
    (names.QUEUE_DEPTH, lambda depth: depth.waiting),
    (names.QUEUE_TOKENS, lambda depth: depth.waiting_tokens),
    (names.QUEUE_PENDING, lambda depth: depth.pending),
    (names.QUEUE_OLDEST_AGE, lambda depth: depth.oldest_age),
    (names.QUEUE_OTHERS_OLDEST_AGE, lambda depth: depth.others_oldest_age),
    (names.QUEUE_LOW_PRIORITY_DEPTH, lambda depth: depth.low_waiting),
    (names.QUEUE_LOW_PRIORITY_PENDING, lambda depth: depth.low_pending),
    (names.QUEUE_LOW_PRIORITY_TIME_USED, lambda depth: depth.low_time_used),
)


def _observer(
    cache: QueueScrapeCache, value: Callable[[QueueDepth], float]
) -> Callable[[], Iterable[Observation]]:
    return lambda: [
        Observation(value(depth), {names.REQUEST_MODEL: model})
        for model, depth in cache.current().items()
    ]


def _states(cache: BatchScrapeCache) -> list[Observation]:
    return [
        Observation(count, {names.STATE: state})
        for each in cache.current()
        for state, count in each.by_state.items()
    ]


def _flight(model: str, stream: bool) -> Mapping[str, str]:
    return {names.REQUEST_MODEL: model, names.STREAM: "true" if stream else "false"}
