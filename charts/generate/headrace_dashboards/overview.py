"""Ten panels that show whether the service is healthy; each links to a row with details."""

from dataclasses import replace

from headrace_common.observability import metric_names as names

from . import promql as q
from .panel import Dashboard, Details, Look, Panel, Query, Row, Unit
from .service import ANSWERED, scope, waiting_and_running

_OF_CLIENTS = f'{q.CODE}=~"{q.CLIENT_FAULTS}"'
_OF_THE_SERVICE = f'{q.CODE}!="",{q.CODE}!~"{q.CLIENT_FAULTS}"'


def dashboard() -> Dashboard:
    return Dashboard(
        name="overview",
        title="Headrace / Overview",
        description="Is the service healthy? Each panel links to the row with its details.",
        variables=scope(names.QUEUE_DEPTH),
        rows=(Row("Now", _now()), Row("Over time", _over_time())),
    )


def _now() -> tuple[Panel, ...]:
    ended = q.total(_ended())
    output = q.rate(names.TOKEN_USAGE, f'{q.TOKEN_TYPE}="output"', "_sum")
    return (
        _stat(
            "Failures",
            "Share of requests that the service failed or refused, without faults of clients.",
            f"({q.total(_ended(_OF_THE_SERVICE))} or vector(0)) / {ended}",
            Unit.SHARE,
            Details("service", "Traffic"),
            warn=0.001,
            alarm=0.01,
        ),
        _stat(
            "First token, p95",
            "95th percentile of the time to first token.",
            q.quantile(0.95, names.TIME_TO_FIRST_TOKEN),
            Unit.SECONDS,
            Details("service", "Latency"),
        ),
        _stat(
            "Oldest waiting request",
            "How long the first in the queue has waited.",
            f"max({q.series(names.QUEUE_OLDEST_AGE)})",
            Unit.SECONDS,
            Details("service", "Queue"),
            warn=30,
            alarm=60,
        ),
        _stat(
            "Engines",
            "Engine processes that export metrics.",
            f"count({q.series(names.ENGINE_KV_UTILIZATION)})",
            Unit.SHORT,
            Details("engines", "Processes"),
        ),
        _stat(
            "Request rate",
            "Requests that ended per second.",
            ended,
            Unit.PER_SECOND,
            Details("service", "Traffic"),
        ),
        _stat(
            "Output",
            "Output tokens per second.",
            q.total(output),
            Unit.TOKENS_PER_SECOND,
            Details("engines", "Batch"),
        ),
    )


def _ended(match: str = "") -> str:
    return q.rate(names.REQUEST_DURATION, match, "_count")


def _stat(
    title: str,
    description: str,
    expr: str,
    unit: Unit,
    details: Details,
    warn: float | None = None,
    alarm: float | None = None,
) -> Panel:
    return Panel(
        title=title,
        description=description,
        queries=(Query(expr),),
        unit=unit,
        look=Look.STAT,
        width=4,
        height=4,
        warn=warn,
        alarm=alarm,
        details=details,
    )


def _over_time() -> tuple[Panel, ...]:
    kind = q.label(names.KIND)
    wanted = q.series(names.OPERATOR_REPLICAS, f'{kind}="desired"')
    return (
        Panel(
            title="Requests by outcome",
            description="Requests that ended per second: answered, ended or refused because of "
            "their client, and failed or refused by the service.",
            queries=(
                Query(q.total(_ended(ANSWERED)), "answered"),
                Query(q.total(_ended(_OF_CLIENTS)), "clients"),
                Query(q.total(_ended(_OF_THE_SERVICE)), "failed"),
            ),
            unit=Unit.PER_SECOND,
            look=Look.STACKED,
            width=12,
            details=Details("service", "Traffic"),
        ),
        replace(waiting_and_running(), width=12, details=Details("service", "Queue")),
        Panel(
            title="KV cache in use",
            description="Share of the KV blocks that sequences hold, by engine. Near 100 % "
            "sequences are preempted.",
            queries=(
                Query(
                    f"max by ({q.POD}) ({q.series(names.ENGINE_KV_UTILIZATION)})",
                    f"{{{{{q.POD}}}}}",
                ),
            ),
            unit=Unit.SHARE,
            maximum=1,
            width=12,
            details=Details("engines", "KV cache"),
        ),
        Panel(
            title="Engines and takeovers",
            description="Engines that the operator wants and that run; requests that another "
            "engine took over because theirs went silent.",
            queries=(
                Query(f"sum(max by ({q.MODEL}) ({wanted}))", "wanted"),
                Query(f"count({q.series(names.ENGINE_KV_UTILIZATION)})", "running"),
                Query(q.total(q.increase(names.QUEUE_REDELIVERIES)), "requests taken over"),
            ),
            width=12,
            details=Details("operator", "Scaling"),
        ),
    )
