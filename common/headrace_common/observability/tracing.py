"""Trace context across the queue, and the names and attributes of the spans of GenAI requests.

The context travels as W3C Trace Context in a message's `trace`. Spans never hold what users wrote
or models answered, unless the caller opts in by adding it. Of OpenTelemetry's global state, only
the context variable is used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ..sampling.params import SamplingParams
from ..wire.messages import MAX_TRACE_CHARS, GenerateRequest
from . import metric_names as names

AttributeValue = str | bool | int | float | Sequence[str]

MAX_STEP_LINKS = 64

_propagator = TraceContextTextMapPropagator()


def inject(span: Span) -> dict[str, str]:
    """The span's context as `traceparent` and `tracestate`; empty if there is no trace."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, set_span_in_context(span, Context()))
    return {key: value for key, value in carrier.items() if len(value) <= MAX_TRACE_CHARS}


def extract(carrier: Mapping[str, str]) -> Context:
    """The context that `carrier` (a message's `trace`, or HTTP headers in lower case) holds.

    A missing or malformed one gives an empty context, in which a new trace starts.
    """
    return _propagator.extract(carrier, Context())


def span_context(carrier: Mapping[str, str]) -> SpanContext:
    """The remote span that `carrier` names; invalid if it names none."""
    return get_current_span(extract(carrier)).get_span_context()


def trace_id(span: Span) -> str | None:
    """The trace id in hexadecimal, for logs and headers; None outside a trace."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else None


def carried_trace_id(carrier: Mapping[str, str]) -> str | None:
    """The trace id in hexadecimal that `carrier` (a message's `trace`) holds, for logs."""
    context = span_context(carrier)
    return f"{context.trace_id:032x}" if context.is_valid else None


def start_request_span(
    tracer: Tracer,
    operation: str,
    sampling: SamplingParams,
    *,
    model: str,
    request_id: str,
    headers: Mapping[str, str],
    stream: bool,
) -> Span:
    """The gateway's span of one request, a child of the client's trace where it sent one.

    `operation` is `chat` or `text_completion`. The caller ends it.
    """
    return tracer.start_span(
        f"{operation} {model}",
        extract(headers),
        SpanKind.SERVER,
        {
            names.OPERATION_NAME: operation,
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_MODEL: model,
            names.REQUEST_ID: request_id,
            names.REQUEST_STREAM: stream,
            **sampling_attributes(sampling),
        },
    )


def sampling_attributes(sampling: SamplingParams) -> dict[str, AttributeValue]:
    """Sampling parameters as `gen_ai.request.*`; those that are off or unset are left out."""
    attributes: dict[str, AttributeValue] = {
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
    }
    optional = {
        names.REQUEST_MAX_TOKENS: sampling.max_tokens,
        names.REQUEST_SEED: sampling.seed,
        names.REQUEST_TOP_K: sampling.top_k if sampling.top_k > 0 else None,
        names.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty or None,
        names.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty or None,
        names.REQUEST_CHOICE_COUNT: sampling.n if sampling.n != 1 else None,
    }
    attributes.update({key: value for key, value in optional.items() if value is not None})
    return attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSummary:
    """The outcome of a request as its client saw it.

    Times are in seconds; None if it did not happen.
    """

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()
    time_to_first_token: float | None = None
    error_type: str | None = None


def end_request_span(span: Span, response: ResponseSummary) -> None:
    """Adds the usage and the outcome, and ends the span."""
    if span.is_recording():
        span.set_attributes(
            {
                names.USAGE_INPUT_TOKENS: response.input_tokens,
                names.USAGE_OUTPUT_TOKENS: response.output_tokens,
                names.USAGE_CACHE_READ_TOKENS: response.cached_tokens,
                names.RESPONSE_FINISH_REASONS: response.finish_reasons,
            }
        )
        if response.time_to_first_token is not None:
            span.set_attribute(names.RESPONSE_TIME_TO_FIRST_CHUNK, response.time_to_first_token)
        _set_error(span, response.error_type)
    span.end()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """One engine's work on a request. Times are Unix nanoseconds by that engine's clock.

    `first_token_ns` is None if it generated none. Steps are the engine's step numbers: they tell
    which requests shared a batch without a span for every request in every step.
    """

    queued_ns: int
    taken_ns: int
    first_token_ns: int | None
    ended_ns: int
    first_step: int
    first_token_step: int
    last_step: int


def record_engine_spans(
    tracer: Tracer,
    request: GenerateRequest,
    times: EngineTimes,
    *,
    engine_id: str,
    attempt: int,
    output_tokens: int,
    cached_tokens: int,
    finish_reasons: Sequence[str] = (),
    error_type: str | None = None,
) -> None:
    """The engine's part of a request's trace, written when the request leaves the engine.

    Spans: the wait in the queue, the engine, and inside it prefill (from taking it to its first
    token) and decode. Records nothing where the trace is not sampled.
    """
    parent = extract(request.trace)
    shared: dict[str, AttributeValue] = {names.REQUEST_ID: request.request_id}
    engine = tracer.start_span(
        names.SPAN_ENGINE, parent, SpanKind.CONSUMER, shared, start_time=times.taken_ns
    )
    inside = set_span_in_context(engine, parent)
    joined = get_current_span(parent).get_span_context().is_valid
    queue = tracer.start_span(
        names.SPAN_QUEUE,
        parent if joined else inside,
        attributes=shared,
        start_time=times.queued_ns,
    )
    queue.end(times.taken_ns)
    if engine.is_recording():
        engine.set_attributes(
            {
                names.REQUEST_MODEL: request.model,
                names.ENGINE_ID: engine_id,
                names.ATTEMPT: attempt,
                names.USAGE_INPUT_TOKENS: len(request.prompt_token_ids),
                names.USAGE_OUTPUT_TOKENS: output_tokens,
                names.USAGE_CACHE_READ_TOKENS: cached_tokens,
                names.RESPONSE_FINISH_REASONS: tuple(finish_reasons),
                names.STEP_FIRST: times.first_step,
                names.STEP_LAST: times.last_step,
                **_latencies(times),
            }
        )
        _set_error(engine, error_type)
        _record_phases(tracer, inside, times)
    engine.end(times.ended_ns)


def record_step_span(
    tracer: Tracer,
    traces: Sequence[Mapping[str, str]],
    *,
    number: int,
    started_ns: int,
    ended_ns: int,
    tokens: int,
) -> None:
    """Writes one engine step as a separate trace, with links to (some) requests of its batch.

    For a sample of steps only, or for slow ones: `traces` are the requests' `trace` mappings.
    """
    contexts = (span_context(trace) for trace in traces[:MAX_STEP_LINKS])
    span = tracer.start_span(
        names.SPAN_STEP,
        Context(),
        attributes={
            names.STEP_NUMBER: number,
            names.STEP_SEQUENCES: len(traces),
            names.STEP_TOKEN_COUNT: tokens,
        },
        links=[Link(context) for context in contexts if context.is_valid],
        start_time=started_ns,
    )
    span.end(ended_ns)


def _record_phases(tracer: Tracer, parent: Context, times: EngineTimes) -> None:
    prefill_end = times.first_token_ns or times.ended_ns
    _phase(
        tracer,
        names.SPAN_PREFILL,
        parent,
        (times.taken_ns, prefill_end),
        (times.first_step, times.first_token_step),
    )
    if times.first_token_ns is not None:
        _phase(
            tracer,
            names.SPAN_DECODE,
            parent,
            (times.first_token_ns, times.ended_ns),
            (times.first_token_step, times.last_step),
        )


def _phase(
    tracer: Tracer, name: str, parent: Context, period: tuple[int, int], steps: tuple[int, int]
) -> None:
    attributes = {names.STEP_FIRST: steps[0], names.STEP_LAST: steps[1]}
    span = tracer.start_span(name, parent, attributes=attributes, start_time=period[0])
    span.end(period[1])


def _latencies(times: EngineTimes) -> dict[str, AttributeValue]:
    latencies: dict[str, AttributeValue] = {
        names.LATENCY_QUEUE: (times.taken_ns - times.queued_ns) / 1e9,
        names.LATENCY_E2E: (times.ended_ns - times.queued_ns) / 1e9,
    }
    if times.first_token_ns is not None:
        latencies[names.LATENCY_TIME_TO_FIRST_TOKEN] = (
            times.first_token_ns - times.queued_ns
        ) / 1e9
        latencies[names.LATENCY_PREFILL] = (times.first_token_ns - times.taken_ns) / 1e9
        latencies[names.LATENCY_DECODE] = (times.ended_ns - times.first_token_ns) / 1e9
    return latencies


def _set_error(span: Span, error_type: str | None) -> None:
    if error_type is not None:
        span.set_attribute(names.ERROR_TYPE, error_type)
        span.set_status(StatusCode.ERROR, error_type)
