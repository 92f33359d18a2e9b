"""Measures and traces one request as its client sees it."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.trace import Span, Tracer

from headrace_common.errors import BackendUnavailable, QueueFull
from headrace_common.observability import metric_names as names
from headrace_common.observability import tracing
from headrace_common.sampling.params import SamplingParams

from ..limits.rate_limits import RateLimited
from ..limits.tenants import Caller
from ..queue_client.run import Piece, Usage
from .metrics import CompletedRequest, GatewayMetrics, RejectReason

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
_CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInfo:
    """The data of a request at its start. `headers` have lower-case names.

    `operation` is `chat`, `text_completion`, `embeddings` or `score`. `request_id` is the
    queue's. `caller` is None if API keys are off.
    """

    request_id: str
    operation: str
    model: str
    sampling: SamplingParams
    stream: bool
    headers: Mapping[str, str]
    caller: Caller | None = None

    @property
    def client_request_id(self) -> str | None:
        """The client's own name for the request: for logs, never a key to anything."""
        given = self.headers.get("x-request-id", "")
        return given if _CLIENT_REQUEST_ID.fullmatch(given) else None

    @property
    def tenant(self) -> str | None:
        return None if self.caller is None else self.caller.tenant


class Observer:
    """Makes an Observation for each request."""

    def __init__(
        self, metrics: GatewayMetrics, tracer: Tracer, clock: Clock = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._tracer = tracer
        self._clock = clock

    def start(self, info: RequestInfo) -> "Observation":
        span = tracing.start_request_span(
            self._tracer,
            info.operation,
            info.sampling,
            model=info.model,
            request_id=info.request_id,
            headers=info.headers,
            stream=info.stream,
        )
        if info.tenant is not None:
            span.set_attribute(names.TENANT, info.tenant)
        return Observation(info, self._metrics, span, self._clock)


@dataclass(slots=True)
class _ChoiceTimes:
    first: float
    last: float
    tokens: int


class Observation:
    """Follows one request; `end` is called exactly once, also after a failure."""

    def __init__(
        self, info: RequestInfo, metrics: GatewayMetrics, span: Span, clock: Clock
    ) -> None:
        self._info = info
        self._client_request_id = info.client_request_id
        self._metrics = metrics
        self._span = span
        self._clock = clock
        self._started = clock()
        self._choices: dict[int, _ChoiceTimes] = {}
        self._finish_reasons: list[str] = []
        self._on_end: list[Callable[[bool], None]] = []
        metrics.started(info.model, stream=info.stream, tenant=info.tenant)

    @property
    def request_name(self) -> str:
        """The id by which the client knows the request: its own, or the request's id."""
        return self._client_request_id or self._info.request_id

    @property
    def trace(self) -> Mapping[str, str]:
        """The span's context, for the message to the engine."""
        return tracing.inject(self._span)

    def admitted(self, requests: int, *, low_priority: bool) -> None:
        info = self._info
        for _ in range(requests):
            self._metrics.admitted(info.model, info.tenant, low_priority=low_priority)

    def rejected(self, error: Exception) -> None:
        if isinstance(error, QueueFull):
            reason = RejectReason.TENANT_LIMIT if error.tenant else RejectReason.QUEUE_FULL
        elif isinstance(error, BackendUnavailable):
            reason = RejectReason.BACKEND_UNAVAILABLE
        elif isinstance(error, RateLimited):
            reason = RejectReason.RATE_LIMIT
        else:
            return
        self._metrics.rejected(self._info.model, reason, self._info.tenant)

    def on_end(self, callback: Callable[[bool], None]) -> None:
        """Has `callback` called at the end with whether the request succeeded."""
        self._on_end.append(callback)

    def piece(self, piece: Piece) -> None:
        if piece.token_ids:
            self.tokens(piece.choice, len(piece.token_ids))
        if piece.finish_reason is not None:
            self._finish_reasons.append(piece.finish_reason)

    def tokens(self, choice: int, count: int) -> None:
        """Notes new tokens of a choice."""
        now = self._clock()
        times = self._choices.get(choice)
        if times is None:
            times = self._choices[choice] = _ChoiceTimes(now, now, 0)
        times.last = now
        times.tokens += count

    @contextmanager
    def before_response(self) -> Iterator[None]:
        """Ends with the error that the block raises; otherwise the response ends it."""
        try:
            yield
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            code = "cancelled" if cancelled else getattr(error, "code", None)
            self.end(Usage(), code or "request_invalid")
            raise

    def disconnected(self) -> None:
        self._metrics.disconnected(self._info.model)

    def end(self, usage: Usage, error_type: str | None = None) -> None:
        choices: Sequence[_ChoiceTimes] = list(self._choices.values())
        first = min((times.first for times in choices), default=None)
        to_first = None if first is None else first - self._started
        for callback in self._on_end:
            callback(error_type is None)
        self._metrics.stopped(self._info.model, stream=self._info.stream, tenant=self._info.tenant)
        self._metrics.completed(
            CompletedRequest(
                model=self._info.model,
                operation=self._info.operation,
                duration=self._clock() - self._started,
                input_tokens=usage.prompt_tokens,
                token_spans=[(times.tokens, times.last - times.first) for times in choices],
                time_to_first_token=to_first,
                error_type=error_type,
                tenant=self._info.tenant,
            )
        )
        self._log(usage, to_first, error_type)
        tracing.end_request_span(
            self._span,
            tracing.ResponseSummary(
                input_tokens=usage.prompt_tokens,
                output_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                finish_reasons=tuple(self._finish_reasons),
                time_to_first_token=to_first,
                error_type=error_type,
            ),
        )

    def _caller_fields(self) -> Mapping[str, str]:
        caller = self._info.caller
        return {} if caller is None else {"tenant": caller.tenant, "api_key": caller.key.id}

    def _log(self, usage: Usage, to_first: float | None, error_type: str | None) -> None:
        logger.info(
            "request ended",
            extra={
                "request_id": self._info.request_id,
                "client_request_id": self._client_request_id,
                "trace_id": tracing.trace_id(self._span),
                "operation": self._info.operation,
                "model": self._info.model,
                **self._caller_fields(),
                "stream": self._info.stream,
                "input_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
                "duration_s": round(self._clock() - self._started, 6),
                "time_to_first_token_s": None if to_first is None else round(to_first, 6),
                "error_type": error_type,
            },
        )
