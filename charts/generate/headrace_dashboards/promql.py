"""PromQL over the project's metrics. Metric and label names come from metric_names only."""

from headrace_common.observability import metric_names as names
from headrace_common.observability.metric_names import Metric, MetricKind

NAMESPACE = "namespace"
"""The label that a ServiceMonitor gives each series: where its pod runs."""
POD = "pod"
WINDOW = "$__rate_interval"


def label(attribute: str) -> str:
    """An attribute's name as a Prometheus label."""
    return attribute.replace(".", "_")


MODEL = label(names.REQUEST_MODEL)
CODE = label(names.ERROR_TYPE)
TOKEN_TYPE = label(names.TOKEN_TYPE)
TENANT = label(names.TENANT_LABEL)
KNOWN_TENANT = f'{TENANT}!=""'
SLEEP_STATE = names.VLLM_SLEEP_STATE
# Metrics of prometheus-redis-exporter, and standard metrics of every process.
REDIS_MEMORY_USED = "redis_memory_used_bytes"
REDIS_MEMORY_MAX = "redis_memory_max_bytes"
REDIS_COMMANDS = "redis_commands_processed_total"
PROCESS_CPU = "process_cpu_seconds_total"
PROCESS_MEMORY = "process_resident_memory_bytes"
CLIENT_FAULTS = "|".join(
    (
        *("client_disconnected", "slow_reader", "cancelled", "request_invalid", "message_invalid"),
        *("request_conflict", "context_length_exceeded", "tenant_queue_full"),
        *("rate_limit_exceeded", "priority_not_allowed", "kept_embeddings_full"),
        "tenant_store_full",
    )
)
"""Error codes of the request's or its client's own making: no failure of the service."""
_PODS = f'{NAMESPACE}=~"$namespace"'
_SERVED = f'{MODEL}=~"$model"'
_MODEL_SERVICES = f'{label(names.K8S_NAMESPACE)}=~"$namespace"'


def series(metric: Metric, match: str = "", suffix: str = "") -> str:
    """The dashboard's part of a metric; `match` is a further label matcher.

    The operator's metrics have the namespace of their ModelService, which may not be its own.
    """
    where = _MODEL_SERVICES if metric in names.OPERATOR_METRICS else _PODS
    matchers = ",".join(part for part in (where, _SERVED, match) if part)
    return f"{metric.prometheus_name}{suffix}{{{matchers}}}"


def pods(name: str, match: str = "") -> str:
    """The dashboard's part of a metric that every process has."""
    return f"{name}{{{','.join(part for part in (_PODS, match) if part)}}}"


def rate(metric: Metric, match: str = "", suffix: str = "") -> str:
    """Increase per second; for a histogram, give the suffix `_count` or `_sum`."""
    assert (metric.kind is MetricKind.HISTOGRAM) == bool(suffix), metric.name
    return f"rate({series(metric, match, suffix)}[{WINDOW}])"


def increase(metric: Metric, match: str = "", window: str = WINDOW) -> str:
    assert metric.kind is MetricKind.COUNTER, metric.name
    return f"increase({series(metric, match)}[{window}])"


def total(expression: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def same_everywhere(metric: Metric) -> str:
    """A value that is the same at every gateway: a sum would count it several times."""
    return f"max by ({MODEL}) ({series(metric)})"


def quantile(share: float, metric: Metric, match: str = "", *by: str) -> str:
    buckets = total(rate(metric, match, "_bucket"), "le", *by)
    return f"histogram_quantile({share}, {buckets})"


def buckets(metric: Metric, match: str = "") -> str:
    """Observations in each bucket and time step, for a heatmap."""
    assert metric.kind is MetricKind.HISTOGRAM, metric.name
    return total(f"increase({series(metric, match, '_bucket')}[{WINDOW}])", "le")


def mean(metric: Metric, match: str = "", *by: str) -> str:
    return ratio(total(rate(metric, match, "_sum"), *by), total(rate(metric, match, "_count"), *by))


def ratio(part: str, whole: str) -> str:
    return f"{part} / {whole}"
