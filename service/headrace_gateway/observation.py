"""What is measured and traced of one request as its client sees it."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.trace import Span, Tracer

from headrace_common import metric_names as names
from headrace_common import tracing
from headrace_common.errors import BackendUnavailable, QueueFull
from headrace_common.sampling import SamplingParams

from .metrics import CompletedRequest, GatewayMetrics, RejectReason
from .rate_limits import RateLimited
from .run import Piece, Usage

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInfo:
    """`operation` is `chat` or `text_completion`; `headers` have lower-case names.

    `request_id` is the queue's, `client_request_id` the caller's own name for it. `tenant` and
    `key_id` are None where API keys are off.
    """

    request_id: str
    client_request_id: str | None
    operation: str
    model: str
    sampling: SamplingParams
    stream: bool
    headers: Mapping[str, str]
    tenant: str | None = None
    key_id: str | None = None


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
    """Follows one request; `end` is called once, whatever happened."""

    def __init__(
        self, info: RequestInfo, metrics: GatewayMetrics, span: Span, clock: Clock
    ) -> None:
        self._info = info
        self._metrics = metrics
        self._span = span
        self._clock = clock
        self._started = clock()
        self._choices: dict[int, _ChoiceTimes] = {}
        self._finish_reasons: list[str] = []
        self._on_end: list[Callable[[bool], None]] = []
        metrics.started(info.model, stream=info.stream, tenant=info.tenant)

    @property
    def trace(self) -> Mapping[str, str]:
        """The span's context, for the message to the engine."""
        return tracing.inject(self._span)

    def admitted(self, requests: int) -> None:
        for _ in range(requests):
            self._metrics.admitted(self._info.model, self._info.tenant)

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

    def on_end(self, tell: Callable[[bool], None]) -> None:
        """Has `tell` called at the end, with whether that was a good one."""
        self._on_end.append(tell)

    def piece(self, piece: Piece) -> None:
        if piece.token_ids:
            self.tokens(piece.choice, len(piece.token_ids))
        if piece.finish_reason is not None:
            self._finish_reasons.append(piece.finish_reason)

    def tokens(self, choice: int, count: int) -> None:
        """New tokens, where they are all the news."""
        now = self._clock()
        times = self._choices.get(choice)
        if times is None:
            times = self._choices[choice] = _ChoiceTimes(now, now, 0)
        times.last = now
        times.tokens += count

    def disconnected(self) -> None:
        self._metrics.disconnected(self._info.model)

    def end(self, usage: Usage, error_type: str | None = None) -> None:
        choices: Sequence[_ChoiceTimes] = list(self._choices.values())
        first = min((times.first for times in choices), default=None)
        to_first = None if first is None else first - self._started
        for tell in self._on_end:
            tell(error_type is None)
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
        if self._info.tenant is None or self._info.key_id is None:
            return {}
        return {"tenant": self._info.tenant, "api_key": self._info.key_id}

    def _log(self, usage: Usage, to_first: float | None, error_type: str | None) -> None:
        logger.info(
            "request ended",
            extra={
                "request_id": self._info.request_id,
                "client_request_id": self._info.client_request_id,
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
