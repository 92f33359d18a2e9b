"""Metrics and traces of one process: which are exported, and where to.

The OTEL_* variables of the OpenTelemetry specification decide, plus the process's own metrics port.
Nothing configured gives no-op meters and tracers: no thread, no socket, no SDK import. Providers
are passed on explicitly, never set as OpenTelemetry's globals.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, assert_never

from opentelemetry.metrics import Meter, NoOpMeterProvider
from opentelemetry.trace import NoOpTracerProvider, Tracer
from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from .metrics_server import HealthCheck, MetricsServer, Page, healthy

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.sampling import Sampler
    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector

SCOPE = "headrace"
FLUSH_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)

_Flusher = Callable[[], object]
_TracesExporter = Literal["otlp", "console", "none"]
_MetricsExporter = Literal["otlp", "prometheus", "console", "none"]
_Protocol = Literal["http/protobuf"]
_SamplerName = Literal[
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
]


def _split(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


class TelemetrySettings(BaseSettings):
    """The OTEL_* variables, named as in the OpenTelemetry specification; others the SDK reads.

    Without `*_exporter` a signal goes to OTLP where an endpoint is set, else nowhere (the
    specification's default would look for a collector on localhost). The SDK itself reads
    OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, headers, certificates, timeouts and batch limits.
    """

    model_config = SettingsConfigDict(env_prefix="OTEL_", env_ignore_empty=True, frozen=True)

    sdk_disabled: bool = False
    traces_exporter: Annotated[
        tuple[_TracesExporter, ...] | None, NoDecode, BeforeValidator(_split)
    ] = None
    metrics_exporter: Annotated[
        tuple[_MetricsExporter, ...] | None, NoDecode, BeforeValidator(_split)
    ] = None
    exporter_otlp_endpoint: str | None = None
    exporter_otlp_traces_endpoint: str | None = None
    exporter_otlp_metrics_endpoint: str | None = None
    exporter_otlp_protocol: _Protocol = "http/protobuf"
    exporter_otlp_traces_protocol: _Protocol = "http/protobuf"
    exporter_otlp_metrics_protocol: _Protocol = "http/protobuf"
    exporter_prometheus_host: str = "localhost"
    exporter_prometheus_port: int = Field(9464, ge=0, le=65535)
    metric_export_interval: float = Field(60_000, gt=0)
    """Milliseconds between two exports of metrics by OTLP."""
    traces_sampler: _SamplerName = "parentbased_always_on"
    traces_sampler_arg: float = Field(1.0, ge=0, le=1)

    @property
    def traces(self) -> frozenset[str]:
        """Where traces go."""
        endpoint = self.exporter_otlp_traces_endpoint or self.exporter_otlp_endpoint
        return self._exporters(self.traces_exporter, endpoint)

    @property
    def metrics(self) -> frozenset[str]:
        """Where metrics go, apart from a metrics port that the process sets."""
        endpoint = self.exporter_otlp_metrics_endpoint or self.exporter_otlp_endpoint
        return self._exporters(self.metrics_exporter, endpoint)

    def endpoint(self, signal: Literal["traces", "metrics"]) -> str | None:
        """Full URL for a signal, or None for the exporter's own default."""
        own = {
            "traces": self.exporter_otlp_traces_endpoint,
            "metrics": self.exporter_otlp_metrics_endpoint,
        }[signal]
        if own is None and self.exporter_otlp_endpoint is not None:
            return f"{self.exporter_otlp_endpoint.rstrip('/')}/v1/{signal}"
        return own

    def _exporters(self, named: tuple[str, ...] | None, endpoint: str | None) -> frozenset[str]:
        if self.sdk_disabled:
            return frozenset()
        if named is None:
            return frozenset({"otlp"} if endpoint else ())
        return frozenset(named) - {"none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """The instruments of a process. `registry` is None if no Prometheus endpoint is open.

    `tracing` and `measuring` say whether spans and metrics are exported, so that callers need not
    prepare data that is not exported.
    """

    meter: Meter
    tracer: Tracer
    tracing: bool = False
    measuring: bool = False
    registry: "CollectorRegistry | None" = None
    server: MetricsServer | None = None
    _flushers: tuple[_Flusher, ...] = field(default=(), repr=False)

    def register(self, collector: "Collector") -> None:
        """Adds a collector of its own to the Prometheus endpoint, if there is one."""
        if self.registry is not None:
            self.registry.register(collector)

    def set_health(self, *, live: HealthCheck = healthy, ready: HealthCheck = healthy) -> None:
        """Sets what /health/live and /health/ready ask; they run on other threads."""
        if self.server is not None:
            self.server.set_health(live=live, ready=ready)

    def set_notice(self, notice: HealthCheck) -> None:
        """Sets a notice that /health/ready shows next to the process's readiness."""
        if self.server is not None:
            self.server.set_notice(notice)

    def set_pages(self, pages: Mapping[str, Page]) -> None:
        """Sets further pages of the metrics port, if there is one."""
        if self.server is not None:
            self.server.set_pages(pages)

    def shutdown(self) -> None:
        """Exports what is left and closes the metrics port. Call once, at the end.

        Blocks, for at most FLUSH_TIMEOUT_S where a collector does not answer; from asyncio use
        `asyncio.to_thread`.
        """
        _run_bounded(self._flushers, FLUSH_TIMEOUT_S)
        if self.server is not None:
            self.server.close()


def disabled() -> Telemetry:
    """Telemetry that is not exported: a call on one of its instruments takes 0.2 microseconds."""
    return Telemetry(
        meter=NoOpMeterProvider().get_meter(SCOPE), tracer=NoOpTracerProvider().get_tracer(SCOPE)
    )


def setup(
    service_name: str,
    settings: TelemetrySettings | None = None,
    *,
    version: str = "",
    instance_id: str | None = None,
    metrics_host: str = "127.0.0.1",
    metrics_port: int | None = None,
    metrics_fd: int | None = None,
    live: HealthCheck = healthy,
    ready: HealthCheck = healthy,
) -> Telemetry:
    """Opens what is configured; `settings` default to the environment.

    `metrics_port` opens /metrics and /health there (0: a free port, see `server.url`), `metrics_fd`
    on a listening socket of the parent instead. Raises SettingsError where neither can be had,
    pydantic's ValidationError for a bad OTEL_* value.
    """
    settings = settings or TelemetrySettings()
    if metrics_port is None and "prometheus" in settings.metrics:
        metrics_host = settings.exporter_prometheus_host
        metrics_port = settings.exporter_prometheus_port
    nothing, opens = disabled(), metrics_port is not None or metrics_fd is not None
    if not opens and not settings.traces and not settings.metrics:
        return nothing
    resource = _resource(service_name, version, instance_id)
    registry = _registry() if opens else None
    server = None
    if registry is not None:
        server = MetricsServer(
            registry,
            host=metrics_host,
            port=metrics_port or 0,
            fd=metrics_fd,
            live=live,
            ready=ready,
        )
    meter, flush_metrics = _metrics(settings, resource, registry)
    tracer, flush_traces = _traces(settings, resource)
    return Telemetry(
        meter=meter or nothing.meter,
        tracer=tracer or nothing.tracer,
        tracing=tracer is not None,
        measuring=meter is not None,
        registry=registry,
        server=server,
        _flushers=tuple(one for one in (flush_metrics, flush_traces) if one is not None),
    )


def _run_bounded(flushers: Sequence[_Flusher], seconds: float) -> None:
    """Runs all functions at once and gives up on those that take longer; the SDK itself retries for
    30 s."""
    threads = [
        threading.Thread(target=flush, name="telemetry-shutdown", daemon=True) for flush in flushers
    ]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        _log.warning("telemetry was not flushed in time", extra={"timeout_s": seconds})


def _resource(service_name: str, version: str, instance_id: str | None) -> "Resource":
    """Our defaults, overridden by OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    attributes = {
        "service.name": service_name,
        "service.version": version,
        "service.instance.id": instance_id,
    }
    known = {name: value for name, value in attributes.items() if value}
    return Resource.create(known).merge(OTELResourceDetector().detect())


def _registry() -> "CollectorRegistry":
    from prometheus_client import CollectorRegistry, ProcessCollector

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def _metrics(
    settings: TelemetrySettings, resource: "Resource", registry: "CollectorRegistry | None"
) -> tuple[Meter | None, _Flusher | None]:
    readers = [_metric_reader(settings, name) for name in settings.metrics - {"prometheus"}]
    if registry is not None and not settings.sdk_disabled:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader

        readers.append(PrometheusMetricReader(scope_info_enabled=False, registry=registry))
    if not readers:
        return None, None
    from opentelemetry.sdk.metrics import MeterProvider

    provider = MeterProvider(readers, resource, shutdown_on_exit=False)
    return provider.get_meter(SCOPE), lambda: provider.shutdown(FLUSH_TIMEOUT_S * 1000)


def _metric_reader(settings: TelemetrySettings, exporter: str) -> "MetricReader":
    from opentelemetry.sdk.metrics.export import (
        ConsoleMetricExporter,
        MetricExporter,
        PeriodicExportingMetricReader,
    )

    target: MetricExporter
    if exporter == "console":
        target = ConsoleMetricExporter()
    else:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        target = OTLPMetricExporter(endpoint=settings.endpoint("metrics"))
    return PeriodicExportingMetricReader(target, settings.metric_export_interval)


def _traces(
    settings: TelemetrySettings, resource: "Resource"
) -> tuple[Tracer | None, _Flusher | None]:
    if not settings.traces:
        return None, None
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(_sampler(settings), resource, shutdown_on_exit=False)
    for exporter in settings.traces:
        provider.add_span_processor(BatchSpanProcessor(_span_exporter(settings, exporter)))
    return provider.get_tracer(SCOPE), provider.shutdown


def _span_exporter(settings: TelemetrySettings, exporter: str) -> "SpanExporter":
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    if exporter == "console":
        return ConsoleSpanExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=settings.endpoint("traces"))


def _sampler(settings: TelemetrySettings) -> "Sampler":
    from opentelemetry.sdk.trace.sampling import (
        ALWAYS_OFF,
        ALWAYS_ON,
        ParentBased,
        TraceIdRatioBased,
    )

    match settings.traces_sampler:
        case "always_on":
            return ALWAYS_ON
        case "always_off":
            return ALWAYS_OFF
        case "traceidratio":
            return TraceIdRatioBased(settings.traces_sampler_arg)
        case "parentbased_always_on":
            return ParentBased(ALWAYS_ON)
        case "parentbased_always_off":
            return ParentBased(ALWAYS_OFF)
        case "parentbased_traceidratio":
            return ParentBased(TraceIdRatioBased(settings.traces_sampler_arg))
        case _:
            assert_never(settings.traces_sampler)
