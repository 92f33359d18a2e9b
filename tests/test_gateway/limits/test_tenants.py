"""Properties of tenants other than their keys: salts, and a limited number of metric labels."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace_common.observability import metric_names as names
from headrace_common.observability.telemetry import Telemetry, setup
from headrace_gateway.http.app import AppDependencies, create_app
from headrace_gateway.limits.api_keys import KeyFile
from headrace_gateway.limits.tenants import TenantLabels, tenant_salt
from headrace_gateway.models.loading import load_static
from headrace_gateway.models.models import Models
from headrace_gateway.settings import GatewaySettings
from headrace_gateway.telemetry.metrics import CompletedRequest, GatewayMetrics, RejectReason
from headrace_testing.api_keys import KeyBook
from headrace_testing.gateway import MODEL, ScriptedEngine, running
from headrace_testing.memory_queue.limits import MemoryKeyUsage
from headrace_testing.telemetry import SpanMemory, scrape, value

salts = st.one_of(st.none(), st.text())


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    opened = setup("gateway", metrics_port=0)
    yield opened
    opened.shutdown()


def url_of(telemetry: Telemetry) -> str:
    assert telemetry.server is not None
    return telemetry.server.url


@example(one=("a", None), other=("a", ""))
@example(one=("a", "b"), other=("a:b", None))
@given(one=st.tuples(st.text(min_size=1), salts), other=st.tuples(st.text(min_size=1), salts))
def test_two_callers_never_share_a_salt(
    one: tuple[str, str | None], other: tuple[str, str | None]
) -> None:
    assert (tenant_salt(*one) == tenant_salt(*other)) == (one == other)


def test_salts_with_and_without_a_tenant_differ() -> None:
    """Without keys a salt is plain UTF-8 text, which never begins with this byte."""
    assert tenant_salt("a", None)[0] == 0xFF
    with pytest.raises(UnicodeDecodeError):
        tenant_salt("a", None).decode()


def test_labels_are_bounded() -> None:
    labels = TenantLabels(most=2)

    labelled_as = [labels.label(tenant) for tenant in ("a", "b", "c", "d", "a", "b")]

    assert labelled_as == ["a", "b", names.OTHER_TENANTS, names.OTHER_TENANTS, "a", "b"]


def exercise(metrics: GatewayMetrics, tenant: str | None) -> None:
    """Records every metric that one request can record."""
    metrics.admitted("demo", tenant)
    metrics.rejected("demo", RejectReason.RATE_LIMIT, tenant)
    metrics.started("demo", stream=True, tenant=tenant)
    metrics.disconnected("demo")
    if tenant is not None:
        metrics.refused_open(tenant)
    metrics.observe_stores(lambda: [(tenant, 5)], 10)
    metrics.completed(
        CompletedRequest(
            model="demo",
            operation=names.OPERATION_CHAT,
            duration=1.0,
            input_tokens=5,
            token_spans=[(5, 1.0)],
            time_to_first_token=0.1,
            tenant=tenant,
        )
    )


def labelled(telemetry: Telemetry) -> set[str]:
    """The names of the metrics with a tenant label."""
    families = scrape(url_of(telemetry))
    return {
        name
        for name, family in families.items()
        if any(names.TENANT_LABEL in sample.labels for sample in family.samples)
    }


def test_only_metrics_declared_with_the_tenant_label_have_it(telemetry: Telemetry) -> None:
    exercise(GatewayMetrics(telemetry.meter), "a")

    wanted = {metric.prometheus_name.removesuffix("_total") for metric in names.TENANT_METRICS}
    assert {name.removesuffix("_total") for name in labelled(telemetry)} == wanted


def test_without_keys_there_is_no_label(telemetry: Telemetry) -> None:
    exercise(GatewayMetrics(telemetry.meter), None)

    assert labelled(telemetry) == set()


@pytest.fixture
def book(tmp_path: Path) -> KeyBook:
    book = KeyBook(tmp_path / "keys.yaml")
    book.add("alice", tenant="team-a")
    book.add("bob", tenant="team-b", limits={"tokens_per_minute": 10})
    return book


async def test_requests_are_measured_and_traced_by_tenant(
    checkpoint: Path, book: KeyBook, telemetry: Telemetry
) -> None:
    settings = GatewaySettings(
        model=str(checkpoint), served_model_name=MODEL, port=0, drain_timeout=0
    )
    served = Models(load_static(settings))
    engine = ScriptedEngine(served.get(MODEL).tokenizer)
    spans, keys = SpanMemory(), KeyFile(book.path)
    deps = AppDependencies(
        served=served,
        client=engine,
        queue=engine,
        telemetry=replace(telemetry, tracer=spans.tracer, tracing=True),
        keys=keys,
        usage=MemoryKeyUsage(),
    )
    async with running(create_app(settings, deps), settings) as (_, port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            for headers in (book.headers("alice"), book.headers("bob"), {}):
                await http.post("/v1/completions", json={"prompt": [5] * 20}, headers=headers)
            book.write("keys: {")
            await keys.refresh()
            families = await asyncio.to_thread(scrape, url_of(telemetry))

    a, b = {"tenant": "team-a"}, {"tenant": "team-b"}
    assert value(families, "headrace_queue_admitted_total", **a) == 1
    assert value(families, "headrace_queue_rejected_total", reason="rate_limit", **b) == 1
    assert value(families, "gen_ai_client_token_usage_sum", gen_ai_token_type="input", **a) == 20
    duration = "gen_ai_server_request_duration_seconds_count"
    assert value(families, duration, error_type="rate_limit_exceeded", **b) == 1
    assert value(families, "headrace_gateway_unauthorized_total") == 1
    assert value(families, "headrace_gateway_api_keys") == 2
    assert value(families, "headrace_gateway_api_keys_current") == 0
    span = spans.spans[f"text_completion {MODEL}"]
    assert span.attributes is not None and span.attributes["headrace.tenant"] == "team-b"
