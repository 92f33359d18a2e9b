"""One trace across gateway, queue and engine: the context is part of the message."""

import pytest
from opentelemetry.trace import StatusCode

from headrace_common.observability import metric_names as names
from headrace_common.observability.tracing import (
    EngineTimes,
    ResponseSummary,
    end_request_span,
    extract,
    inject,
    record_engine_spans,
    record_step_span,
    start_request_span,
    trace_id,
)
from headrace_common.sampling.params import SamplingParams
from headrace_common.wire.messages import GenerateRequest, decode_request, encode_request
from headrace_testing.telemetry import SpanMemory

CLIENT_TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT_HEADERS = {"traceparent": f"00-{CLIENT_TRACE}-b7ad6b7169203331-01", "tracestate": "a=1"}
SECOND = 1_000_000_000
TIMES = EngineTimes(
    queued_ns=100 * SECOND,
    taken_ns=102 * SECOND,
    first_token_ns=103 * SECOND,
    ended_ns=107 * SECOND,
    first_step=11,
    first_token_step=12,
    last_step=52,
)


def request_with(trace: dict[str, str]) -> GenerateRequest:
    return GenerateRequest(
        request_id="r1",
        model="demo",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(seed=1, max_tokens=40),
        created_ms=100_000,
        deadline_ms=200_000,
        trace=trace,
    )


def test_one_trace_reaches_from_the_client_into_the_engine() -> None:
    gateway, engine = SpanMemory(), SpanMemory()
    span = start_request_span(
        gateway.tracer,
        names.OPERATION_CHAT,
        SamplingParams(temperature=0.5, top_k=5, max_tokens=40),
        model="demo",
        request_id="r1",
        headers=CLIENT_HEADERS,
        stream=True,
    )
    message = decode_request(encode_request(request_with(inject(span))))
    record_engine_spans(
        engine.tracer,
        message,
        TIMES,
        engine_id="engine-a",
        attempt=1,
        output_tokens=40,
        cached_tokens=0,
        finish_reasons=["length"],
    )
    end_request_span(
        span, ResponseSummary(input_tokens=3, output_tokens=40, finish_reasons=("length",))
    )
    root = gateway.spans["chat demo"]
    assert root.attributes is not None
    assert root.attributes[names.USAGE_OUTPUT_TOKENS] == 40
    assert root.attributes[names.REQUEST_TOP_K] == 5
    spans = {**gateway.spans, **engine.spans}
    assert {f"{s.context.trace_id:032x}" for s in spans.values()} == {CLIENT_TRACE}
    parents = {name: s.parent.span_id for name, s in spans.items() if s.parent is not None}
    own = {name: s.context.span_id for name, s in spans.items()}
    assert parents[names.SPAN_QUEUE] == parents[names.SPAN_ENGINE] == own["chat demo"]
    assert parents[names.SPAN_PREFILL] == parents[names.SPAN_DECODE] == own[names.SPAN_ENGINE]


def test_engine_spans_carry_their_times_and_steps() -> None:
    memory = SpanMemory()
    record_engine_spans(
        memory.tracer,
        request_with(CLIENT_HEADERS),
        TIMES,
        engine_id="engine-a",
        attempt=2,
        output_tokens=40,
        cached_tokens=1,
    )
    spans = memory.spans
    periods = {name: (s.start_time, s.end_time) for name, s in spans.items()}
    assert periods == {
        names.SPAN_QUEUE: (100 * SECOND, 102 * SECOND),
        names.SPAN_ENGINE: (102 * SECOND, 107 * SECOND),
        names.SPAN_PREFILL: (102 * SECOND, 103 * SECOND),
        names.SPAN_DECODE: (103 * SECOND, 107 * SECOND),
    }
    attributes = spans[names.SPAN_ENGINE].attributes
    assert attributes is not None
    assert attributes[names.LATENCY_QUEUE] == 2.0
    assert attributes[names.LATENCY_TIME_TO_FIRST_TOKEN] == 3.0
    assert attributes[names.LATENCY_DECODE] == 4.0
    assert (attributes[names.STEP_FIRST], attributes[names.STEP_LAST]) == (11, 52)
    assert attributes[names.ATTEMPT] == 2


def test_a_request_without_a_trace_gets_a_new_one_from_the_engine() -> None:
    memory = SpanMemory()
    record_engine_spans(
        memory.tracer,
        request_with({}),
        TIMES,
        engine_id="engine-a",
        attempt=1,
        output_tokens=1,
        cached_tokens=0,
        error_type="deadline_exceeded",
    )
    spans = memory.spans
    assert len(spans) == 4
    assert len({span.context.trace_id for span in spans.values()}) == 1
    assert spans[names.SPAN_ENGINE].status.status_code is StatusCode.ERROR


def test_an_unsampled_trace_stays_unsampled_in_the_engine() -> None:
    memory = SpanMemory()
    header = CLIENT_HEADERS["traceparent"].removesuffix("01") + "00"
    record_engine_spans(
        memory.tracer,
        request_with({"traceparent": header}),
        TIMES,
        engine_id="engine-a",
        attempt=1,
        output_tokens=1,
        cached_tokens=0,
    )
    assert memory.spans == {}


def test_a_step_links_to_its_requests() -> None:
    memory = SpanMemory()
    record_step_span(
        memory.tracer,
        [CLIENT_HEADERS, {}, {"traceparent": "nonsense"}],
        number=7,
        started_ns=SECOND,
        ended_ns=2 * SECOND,
        tokens=3,
    )
    step = memory.spans[names.SPAN_STEP]
    assert [f"{link.context.trace_id:032x}" for link in step.links] == [CLIENT_TRACE]
    assert step.attributes is not None
    assert step.attributes[names.STEP_SEQUENCES] == 3


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_malformed_context_starts_a_new_trace(header: str) -> None:
    memory = SpanMemory()
    span = memory.tracer.start_span("x", extract({"traceparent": header}))
    assert trace_id(span) is not None
    assert span.is_recording()


def test_no_prompt_and_no_output_is_on_a_span() -> None:
    memory = SpanMemory()
    span = start_request_span(
        memory.tracer,
        names.OPERATION_COMPLETION,
        SamplingParams(stop=("secret stop",)),
        model="demo",
        request_id="r1",
        headers={},
        stream=False,
    )
    end_request_span(span, ResponseSummary(input_tokens=1, output_tokens=1))
    recorded = memory.spans["text_completion demo"]
    assert "secret" not in str(dict(recorded.attributes or {}))
    assert not {names.INPUT_MESSAGES, names.OUTPUT_MESSAGES} & set(recorded.attributes or {})
