"""The set-up of metrics and traces: what is exported and where to, and that disabled telemetry
costs nothing."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest
from opentelemetry.metrics import Observation
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import Metric
from prometheus_client.registry import Collector
from pydantic import ValidationError

from headrace_common.errors import SettingsError
from headrace_common.observability import metric_names as names
from headrace_common.observability.instruments import (
    counter,
    histogram,
    observed_gauge,
    up_down_counter,
)
from headrace_common.observability.metric_names import ALL_METRICS, MetricKind
from headrace_common.observability.metrics_server import MAX_SCRAPES
from headrace_common.observability.telemetry import Telemetry, TelemetrySettings, disabled, setup
from headrace_common.observability.tracing import extract, inject
from headrace_testing.telemetry import otlp_collector, scrape, value


@pytest.fixture(autouse=True)
def _no_otel_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(variable)


@contextmanager
def on_a_port() -> Iterator[tuple[Telemetry, str]]:
    telemetry = setup("test", metrics_port=0)
    assert telemetry.server is not None
    try:
        yield telemetry, telemetry.server.url
    finally:
        telemetry.shutdown()


def test_nothing_configured_starts_no_thread_opens_no_socket_and_imports_no_sdk() -> None:
    code = """
import os, sys, threading
from headrace_common.observability.telemetry import setup
def sockets():
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(p).startswith("socket:") for p in paths if os.path.lexists(p))
before = sockets()
telemetry = setup("idle")
telemetry.meter.create_counter("x").add(1)
telemetry.tracer.start_span("x").end()
print(threading.active_count(), sockets() - before, "opentelemetry.sdk" in sys.modules)
telemetry.shutdown()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={})
    assert result.stdout.split() == ["1", "0", "False"], result.stderr


def test_nothing_configured_keeps_the_callers_trace_context() -> None:
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    span = disabled().tracer.start_span("request", extract({"traceparent": header}))
    assert inject(span) == {"traceparent": header}


@pytest.mark.parametrize("metric", ALL_METRICS, ids=lambda metric: metric.name)
def test_every_metric_has_its_name_on_the_prometheus_port(metric: names.Metric) -> None:
    with on_a_port() as (telemetry, url):
        match metric.kind:
            case MetricKind.COUNTER:
                counter(telemetry.meter, metric).add(2)
            case MetricKind.UP_DOWN_COUNTER:
                up_down_counter(telemetry.meter, metric).add(2)
            case MetricKind.HISTOGRAM:
                histogram(telemetry.meter, metric).record(2)
            case MetricKind.GAUGE:
                observed_gauge(telemetry.meter, metric, lambda: [Observation(2)])
        suffix = "_sum" if metric.kind is MetricKind.HISTOGRAM else ""
        families = scrape(url)
        assert value(families, metric.prometheus_name + suffix) == 2
        assert metric.description in {family.documentation for family in families.values()}


def test_a_histogram_has_exactly_the_listed_edges() -> None:
    with on_a_port() as (telemetry, url):
        histogram(telemetry.meter, names.REQUEST_DURATION).record(100.0)
        family = scrape(url)["gen_ai_server_request_duration_seconds"]
    edges = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
    assert edges == [*names.REQUEST_DURATION.buckets, float("inf")]
    assert set(edges) > {0.01, 81.92, 5242.88}


def test_metric_names_are_unique() -> None:
    assert len({metric.prometheus_name for metric in ALL_METRICS}) == len(ALL_METRICS)


class SlowCollector(Collector):
    """Counts the scrapes that run at the same time."""

    def __init__(self) -> None:
        self.active = self.most = 0

    def collect(self) -> Iterator[Metric]:
        self.active += 1
        self.most = max(self.most, self.active)
        time.sleep(0.005)  # time for another scrape to arrive
        self.active -= 1
        yield from ()


def test_scrapes_at_the_same_time_do_not_mix() -> None:
    collector = SlowCollector()
    with on_a_port() as (telemetry, url):
        telemetry.register(collector)
        collector.most = 0
        counter(telemetry.meter, names.QUEUE_ADMITTED).add(1)
        # A scrape has its place until after its answer is read: each thread may count twice.
        with ThreadPoolExecutor(MAX_SCRAPES // 2) as pool:
            for families in pool.map(lambda _: scrape(url), range(16)):
                assert value(families, "headrace_queue_admitted_total") == 1
    assert collector.most == 1


def test_health_says_what_is_wrong() -> None:
    problems: dict[str, str | None] = {"live": None, "ready": "the model is loading"}
    with on_a_port() as (telemetry, url):
        telemetry.set_health(live=lambda: problems["live"], ready=lambda: problems["ready"])
        assert urlopen(f"{url}/health/live").read() == b"ok\n"
        assert _refusal(f"{url}/health/ready") == (503, "the model is loading\n")
        problems["live"], problems["ready"] = "no step for 130 s", None
        assert _refusal(f"{url}/health/live") == (503, "no step for 130 s\n")
        assert urlopen(f"{url}/health/ready").status == 200
        assert _refusal(f"{url}/other")[0] == 404


def test_a_metrics_port_that_is_taken_is_named() -> None:
    with on_a_port() as (telemetry, _):
        assert telemetry.server is not None
        with pytest.raises(SettingsError, match=f"127.0.0.1:{telemetry.server.port}"):
            setup("second", metrics_port=telemetry.server.port)


def test_a_socket_of_the_parent_keeps_its_port_from_run_to_run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]
        for _ in range(2):
            telemetry = setup("child", metrics_fd=os.dup(ours.fileno()))
            assert telemetry.server is not None
            assert telemetry.server.url == f"http://127.0.0.1:{port}"
            assert urlopen(f"{telemetry.server.url}/health/live").read() == b"ok\n"
            telemetry.shutdown()


def test_a_descriptor_that_is_not_a_socket_is_named(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(SettingsError, match="metrics_fd"):
        setup("child", metrics_fd=file.fileno())


def test_shutdown_closes_the_port_and_ends_the_thread() -> None:
    with on_a_port() as (_, url):
        urlopen(f"{url}/health/live").close()
    with pytest.raises(URLError):
        urlopen(f"{url}/health/live")
    assert "metrics-server" not in {thread.name for thread in threading.enumerate()}


def test_otlp_gets_metrics_and_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=ci")
        telemetry = setup("gateway", version="1.2", instance_id="gateway-7")
        assert telemetry.tracing and telemetry.measuring and telemetry.server is None
        telemetry.tracer.start_span("chat demo").end()
        counter(telemetry.meter, names.QUEUE_ADMITTED).add(3)
        telemetry.shutdown()
    traces = ExportTraceServiceRequest.FromString(collector.bodies["/v1/traces"][0])
    resource = traces.resource_spans[0]
    attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert attributes["service.name"] == "gateway"
    assert attributes["service.instance.id"] == "gateway-7"
    assert attributes["deployment.environment.name"] == "ci"
    assert resource.scope_spans[0].spans[0].name == "chat demo"
    metrics = ExportMetricsServiceRequest.FromString(collector.bodies["/v1/metrics"][-1])
    exported = metrics.resource_metrics[0].scope_metrics[0].metrics[0]
    assert (exported.name, exported.unit) == ("headrace.queue.admitted", "{request}")


def test_shutdown_does_not_wait_for_a_collector_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace_common.observability.telemetry.FLUSH_TIMEOUT_S", 0.05)
    with hanging_server() as (url, release):
        telemetry = setup("engine", TelemetrySettings(exporter_otlp_traces_endpoint=url))
        telemetry.tracer.start_span("x").end()
        telemetry.shutdown()
        assert "telemetry was not flushed in time" in caplog.messages
        flushers = [thread for thread in threading.enumerate() if "shutdown" in thread.name]
        release()
        for thread in flushers:
            thread.join()


def test_a_single_signal_can_be_exported_to_its_own_endpoint() -> None:
    with otlp_collector() as collector:
        settings = TelemetrySettings(
            exporter_otlp_traces_endpoint=f"{collector.url}/traces-only", metrics_exporter=("none",)
        )
        telemetry = setup("engine", settings)
        assert telemetry.tracing and not telemetry.measuring
        telemetry.tracer.start_span("x").end()
        telemetry.shutdown()
    assert list(collector.bodies) == ["/traces-only"]


def test_the_environments_service_name_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with on_a_port() as (telemetry, url):
        counter(telemetry.meter, names.QUEUE_ADMITTED).add(1)
        assert value(scrape(url), "target_info", service_name="mine") == 1


@pytest.mark.parametrize(
    ("sampler", "sampled"), [("always_on", True), ("always_off", False), ("traceidratio", False)]
)
def test_the_sampler_chooses_the_exported_traces(sampler: str, sampled: bool) -> None:
    with otlp_collector() as collector:
        settings = TelemetrySettings.model_validate(
            {
                "exporter_otlp_endpoint": collector.url,
                "metrics_exporter": "none",
                "traces_sampler": sampler,
                "traces_sampler_arg": 0.0,
            }
        )
        telemetry = setup("engine", settings)
        assert telemetry.tracer.start_span("x").is_recording() is sampled
        telemetry.shutdown()


def test_a_disabled_sdk_exports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    telemetry = setup("engine")
    assert not telemetry.tracing and not telemetry.measuring


@pytest.mark.parametrize(
    ("variable", "bad"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_TRACES_SAMPLER", "sometimes"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
    ],
)
def test_unsupported_settings_stop_the_start(
    monkeypatch: pytest.MonkeyPatch, variable: str, bad: str
) -> None:
    monkeypatch.setenv(variable, bad)
    with pytest.raises(ValidationError, match=variable.removeprefix("OTEL_").lower()):
        setup("engine")


@contextmanager
def hanging_server() -> Iterator[tuple[str, Callable[[], None]]]:
    """Accepts connections, and answers none until it is released; then it closes them."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                released.wait()
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        released = threading.Event()
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/", released.set
        finally:
            released.set()
            thread.join()


def _refusal(url: str) -> tuple[int, str]:
    with pytest.raises(HTTPError) as caught:
        urlopen(url)
    with caught.value as error:
        return error.code, error.read().decode()
