"""OpenTelemetry instruments made from the definitions in metric_names.

Bucket edges are passed as advice, so that a user may still choose exponential histograms for OTLP.
"""

from collections.abc import Callable, Iterable, Sequence

from opentelemetry.metrics import (
    CallbackOptions,
    Counter,
    Histogram,
    Meter,
    Observation,
    UpDownCounter,
)

from .metric_names import Metric, MetricKind

Observe = Callable[[], Iterable[Observation]]
"""Reads the present values; called by exporters, on their threads, only when they collect."""


def counter(meter: Meter, metric: Metric) -> Counter:
    assert metric.kind is MetricKind.COUNTER, metric.name
    return meter.create_counter(metric.name, metric.unit, metric.description)


def up_down_counter(meter: Meter, metric: Metric) -> UpDownCounter:
    assert metric.kind is MetricKind.UP_DOWN_COUNTER, metric.name
    return meter.create_up_down_counter(metric.name, metric.unit, metric.description)


def histogram(meter: Meter, metric: Metric) -> Histogram:
    assert metric.kind is MetricKind.HISTOGRAM, metric.name
    return meter.create_histogram(
        metric.name,
        metric.unit,
        metric.description,
        explicit_bucket_boundaries_advisory=metric.buckets,
    )


def observed_gauge(meter: Meter, metric: Metric, observe: Observe) -> None:
    assert metric.kind is MetricKind.GAUGE, metric.name
    meter.create_observable_gauge(metric.name, _callbacks(observe), metric.unit, metric.description)


def observed_counter(meter: Meter, metric: Metric, observe: Observe) -> None:
    """A counter whose totals are counted elsewhere and read when exported."""
    assert metric.kind is MetricKind.COUNTER, metric.name
    meter.create_observable_counter(
        metric.name, _callbacks(observe), metric.unit, metric.description
    )


def _callbacks(observe: Observe) -> Sequence[Callable[[CallbackOptions], Iterable[Observation]]]:
    return [lambda _options: observe()]
