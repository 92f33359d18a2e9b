"""The dashboard of the operator's decisions: replicas, signals, reasons and cold starts."""

from headrace_common.observability import metric_names as names

from . import promql as q
from .panel import Dashboard, Look, Panel, Query, Row, Unit
from .service import percentiles, scope

_NAME = f"{{{{{q.MODEL}}}}}"


def dashboard() -> Dashboard:
    return Dashboard(
        name="operator",
        title="Headrace / Operator",
        description="Replicas of each model, the signals they follow, and the operator itself.",
        variables=scope(names.OPERATOR_REPLICAS),
        rows=(Row("Scaling", _scaling()), Row("Operator", _operator())),
    )


def _scaling() -> tuple[Panel, ...]:
    kind, signal, reason = q.label(names.KIND), q.label(names.SIGNAL), q.label(names.REASON)
    key = (q.MODEL, q.label(names.K8S_NAMESPACE), signal)
    value = f"max by ({', '.join(key)}) ({q.series(names.OPERATOR_SIGNAL)})"
    target = f"max by ({', '.join(key)}) ({q.series(names.OPERATOR_SIGNAL_TARGET)})"
    return (
        Panel(
            title="Replicas",
            description="Engines that the operator wants, and those that are ready.",
            queries=(
                Query(
                    f"max by ({q.MODEL}, {kind}) ({q.series(names.OPERATOR_REPLICAS)})",
                    f"{_NAME} {{{{{kind}}}}}",
                ),
            ),
            width=12,
        ),
        Panel(
            title="Backlog",
            description="Requests that wait, and those that engines have taken.",
            queries=(
                Query(q.same_everywhere(names.QUEUE_DEPTH), f"{_NAME} waiting"),
                Query(q.same_everywhere(names.QUEUE_PENDING), f"{_NAME} running"),
            ),
            width=12,
        ),
        Panel(
            title="Signals against targets",
            description="Each scaling signal as a multiple of its target; over 1 adds replicas.",
            queries=(Query(f"{value} / {target}", f"{_NAME} {{{{{signal}}}}}"),),
            unit=Unit.SHARE,
            width=12,
        ),
        Panel(
            title="Decisions",
            description="Scaling decisions by reason.",
            queries=(
                Query(
                    q.total(q.increase(names.OPERATOR_DECISIONS), q.MODEL, reason),
                    f"{_NAME} {{{{{reason}}}}}",
                ),
            ),
            look=Look.BARS,
            width=12,
        ),
    )


def _operator() -> tuple[Panel, ...]:
    result = q.label(names.RESULT)
    return (
        Panel(
            title="Cold starts",
            description="Time from an engine pod's creation until it is ready.",
            queries=percentiles(names.OPERATOR_COLD_START_DURATION),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Cold starts, spread",
            description="Distribution of the start times of engine pods over time.",
            queries=(Query(q.buckets(names.OPERATOR_COLD_START_DURATION)),),
            unit=Unit.SECONDS,
            look=Look.HEATMAP,
        ),
        Panel(
            title="Reconciliations",
            description="Finished reconciliations per second, by result.",
            queries=(
                Query(q.total(q.rate(names.OPERATOR_RECONCILES), result), f"{{{{{result}}}}}"),
            ),
            unit=Unit.PER_SECOND,
        ),
    )
