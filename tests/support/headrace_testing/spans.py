"""Spans that a process exported by OTLP, decoded and found by name."""

from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from .telemetry import Collector

TRACES = "/v1/traces"


@dataclass(frozen=True, slots=True)
class ExportedSpan:
    """An exported span.

    Ids are hexadecimal, times Unix nanoseconds; a root's `parent_id` is empty.
    """

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    started: int
    ended: int
    attributes: dict[str, object]


def exported(collector: Collector, trace_id: str) -> dict[str, ExportedSpan]:
    """The spans of one trace that have arrived so far, by name; names must be unique."""
    found: dict[str, ExportedSpan] = {}
    for body in list(collector.bodies.get(TRACES, [])):
        for span in _decode(body):
            if span.trace_id == trace_id:
                assert span.name not in found, f"two spans {span.name}"
                found[span.name] = span
    return found


def _decode(body: bytes) -> Sequence[ExportedSpan]:
    message = ExportTraceServiceRequest()
    message.ParseFromString(body)
    spans = []
    for resource in message.resource_spans:
        service = {a.key: a.value.string_value for a in resource.resource.attributes}
        for scope in resource.scope_spans:
            spans += [
                ExportedSpan(
                    name=span.name,
                    service=service["service.name"],
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    started=span.start_time_unix_nano,
                    ended=span.end_time_unix_nano,
                    attributes={a.key: _value(a.value) for a in span.attributes},
                )
                for span in scope.spans
            ]
    return spans


def _value(value: object) -> object:
    kind = value.WhichOneof("value")  # type: ignore[attr-defined]
    return getattr(value, kind) if kind else None
