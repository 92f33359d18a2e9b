"""Telemetry for tests: a fake OTLP collector, spans in memory, and the parsed metrics page."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import urlopen

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


class SpanMemory:
    """A tracer and what it recorded."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer: Tracer = provider.get_tracer("test")

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._exporter.get_finished_spans()}


@dataclass(slots=True)
class Collector:
    """The posted bodies by path."""

    url: str
    bodies: dict[str, list[bytes]] = field(default_factory=dict)


@contextmanager
def otlp_collector() -> Iterator[Collector]:
    """An OTLP/HTTP collector on loopback that keeps all that it receives."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.bodies.setdefault(self.path, []).append(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def scrape(url: str) -> dict[str, Metric]:
    """The metric families of a Prometheus endpoint, by name."""
    with urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    """The only sample called `name` that has these labels."""
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, f"{len(found)} samples {name} with {labels}"
    return float(found[0])
