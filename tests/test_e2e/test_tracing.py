"""One request seen from outside: one trace across both processes, its log lines, its metrics."""

import secrets

import pytest

from headrace_common.observability import metric_names as names
from headrace_engine.core.start_phases import PHASES
from headrace_testing.processes import HeadraceProcess, until
from headrace_testing.single import SingleStack
from headrace_testing.spans import ExportedSpan, exported
from headrace_testing.stack import MODEL
from headrace_testing.telemetry import scrape

TRACE_SPANS = {
    f"text_completion {MODEL}",
    names.SPAN_QUEUE,
    names.SPAN_ENGINE,
    names.SPAN_PREFILL,
    names.SPAN_DECODE,
}
# Counters are exported only after their first event.
RARE = {names.QUEUE_REJECTED, names.QUEUE_REDELIVERIES, names.GATEWAY_DISCONNECTS}
RARE |= {names.GATEWAY_GRAMMAR_CHECKS, names.GATEWAY_IMAGES, names.GATEWAY_PLACEMENT_TOKENS}
RARE |= {names.QUEUE_LOW_PRIORITY_ADMITTED, names.BATCH_BEHIND}
# Counters of features that are off.
RARE |= {names.GATEWAY_API_KEYS, names.GATEWAY_API_KEYS_CURRENT, names.GATEWAY_UNAUTHORIZED}
RARE |= {names.GATEWAY_OPEN_REFUSED}
RARE |= {names.ENGINE_TURNS, names.ENGINE_TURN_WAIT}
RARE |= {names.GATEWAY_CANARY_COMPARISONS, names.GATEWAY_CANARY_FIRST_DIFFERENCE}
RARE |= {names.ENGINE_SPEC_TOKENS, names.ENGINE_KV_SHARED, names.ENGINE_KV_SHARED_BLOCKS}
RARE |= {names.ENGINE_HANDOVER_DURATION, names.ENGINE_HANDOVER_TOKENS, names.ENGINE_HANDOVER_KV}


@pytest.fixture(scope="module")
def traced(single: SingleStack) -> tuple[str, str, dict[str, ExportedSpan]]:
    """The trace id and span id of a client, and all spans of its only request."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace_id}-{span_id}-01", "x-request-id": trace_id}
    assert single.complete(headers, seed=1, max_tokens=5).status_code == 200
    until(
        lambda: exported(single.collector, trace_id).keys() >= TRACE_SPANS,
        "all spans to be exported",
    )
    return trace_id, span_id, exported(single.collector, trace_id)


def test_one_trace_leads_from_the_client_to_the_engines_steps(
    traced: tuple[str, str, dict[str, ExportedSpan]],
) -> None:
    _, client, spans = traced
    assert spans.keys() == TRACE_SPANS
    http, engine = spans[f"text_completion {MODEL}"], spans[names.SPAN_ENGINE]
    prefill, decode = spans[names.SPAN_PREFILL], spans[names.SPAN_DECODE]
    assert http.parent_id == client
    assert spans[names.SPAN_QUEUE].parent_id == engine.parent_id == http.span_id
    assert prefill.parent_id == decode.parent_id == engine.span_id
    assert {http.service} == {"headrace-gateway"}
    assert {engine.service, prefill.service, decode.service} == {"headrace-engine"}
    assert http.started <= engine.started == prefill.started
    assert prefill.ended == decode.started <= decode.ended == engine.ended <= http.ended


def test_spans_contain_the_parameters_and_the_usage(
    traced: tuple[str, str, dict[str, ExportedSpan]],
) -> None:
    _, _, spans = traced
    http, engine = spans[f"text_completion {MODEL}"], spans[names.SPAN_ENGINE]
    for span in (http, engine):
        assert span.attributes[names.REQUEST_MODEL] == MODEL
        assert span.attributes[names.USAGE_INPUT_TOKENS] == 3
        assert span.attributes[names.USAGE_OUTPUT_TOKENS] == 5
    assert http.attributes[names.REQUEST_SEED] == 1
    assert http.attributes[names.REQUEST_ID] == engine.attributes[names.REQUEST_ID] != ""


def test_logs_name_the_request_and_its_trace(
    single: SingleStack, traced: tuple[str, str, dict[str, ExportedSpan]]
) -> None:
    trace_id, _, spans = traced
    request_id = spans[names.SPAN_ENGINE].attributes[names.REQUEST_ID]
    for process in (single.gateway, single.engine):
        (line,) = lines_of(process, trace_id)
        assert line["request_id"] == request_id
        assert line["output_tokens"] == 5
    assert lines_of(single.gateway, trace_id)[0]["client_request_id"] == trace_id


def test_an_engine_says_where_the_time_of_its_start_went(single: SingleStack) -> None:
    line = single.engine.await_log("engine ready")
    phases, seconds = line["phases"], line["seconds"]
    assert isinstance(phases, dict) and isinstance(seconds, float)
    loaded = {"settings", "tokenizer", "device", "weights", "kv_cache", "warm_up", "grammars"}
    assert loaded | {"connection", "registration", "first_beat"} <= phases.keys() <= {*PHASES}
    assert sum(phases.values()) == pytest.approx(seconds, abs=0.001 * len(PHASES))
    families = scrape(f"http://127.0.0.1:{single.engine.metrics_port}")
    family = families[names.ENGINE_START_DURATION.prometheus_name]
    assert {sample.labels["phase"]: sample.value for sample in family.samples} == pytest.approx(
        phases, abs=0.001
    )


def lines_of(process: HeadraceProcess, trace_id: str) -> list[dict[str, object]]:
    return [line for line in process.log_entries() if line.get("trace_id") == trace_id]


@pytest.mark.usefixtures("traced")
def test_every_metric_is_on_the_metrics_ports(single: SingleStack) -> None:
    for process, metrics in (
        (single.gateway, names.GATEWAY_METRICS),
        (single.engine, names.ENGINE_METRICS),
    ):
        families = scrape(f"http://127.0.0.1:{process.metrics_port}")
        expected = {m.prometheus_name.removesuffix("_total") for m in {*metrics} - RARE}
        assert expected <= families.keys()
