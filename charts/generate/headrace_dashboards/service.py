"""The service as its users see it: traffic, errors, latency, the queue, Redis."""

from headrace_common.observability import metric_names as names
from headrace_common.observability.metric_names import Metric

from . import promql as q
from .panel import Dashboard, Look, Panel, Query, Row, Unit, Variable

PERCENTILES = (0.5, 0.9, 0.95, 0.99)
ANSWERED = f'{q.CODE}=""'


def dashboard() -> Dashboard:
    return Dashboard(
        name="service",
        title="Headrace / Service",
        description="Requests, latencies and the queue, as clients and gateways see them.",
        variables=scope(names.QUEUE_DEPTH),
        rows=(
            Row("Traffic", _traffic()),
            Row("Latency", _latency()),
            Row("Queue", _queue()),
            Row("Tenants", _tenants()),
            Row("Batches", _batches()),
            Row("Faults and Redis", _faults()),
        ),
    )


def scope(metric: Metric) -> tuple[Variable, Variable]:
    """The variables for namespaces and models that have this metric."""
    name = metric.prometheus_name
    owned = metric in names.OPERATOR_METRICS
    namespace = q.label(names.K8S_NAMESPACE) if owned else q.NAMESPACE
    return (
        Variable(name="namespace", label="Namespace", query=f"label_values({name}, {namespace})"),
        Variable(
            name="model",
            label="Model",
            query=f'label_values({name}{{{namespace}=~"$namespace"}}, {q.MODEL})',
        ),
    )


def percentiles(metric: Metric, match: str = "") -> tuple[Query, ...]:
    return tuple(
        Query(q.quantile(share, metric, match), f"p{100 * share:.0f}") for share in PERCENTILES
    )


def _traffic() -> tuple[Panel, ...]:
    operation, stream = q.label(names.OPERATION_NAME), q.label(names.STREAM)
    ended = q.rate(names.REQUEST_DURATION, suffix="_count")
    errors = q.rate(names.REQUEST_DURATION, f'{q.CODE}!=""', "_count")
    return (
        Panel(
            title="Requests",
            description="Requests that ended per second, by operation.",
            queries=(
                Query(q.total(ended, q.MODEL, operation), f"{{{{{q.MODEL}}}}} {{{{{operation}}}}}"),
            ),
            unit=Unit.PER_SECOND,
            look=Look.STACKED,
        ),
        Panel(
            title="Errors",
            description="Requests per second that ended with an error, by its code.",
            queries=(Query(q.total(errors, q.CODE), f"{{{{{q.CODE}}}}}"),),
            unit=Unit.PER_SECOND,
            look=Look.STACKED,
        ),
        Panel(
            title="In flight",
            description="Requests that gateways are serving, by whether they stream.",
            queries=(
                Query(
                    q.total(q.series(names.GATEWAY_REQUESTS_IN_FLIGHT), stream),
                    f"stream={{{{{stream}}}}}",
                ),
            ),
            look=Look.STACKED,
        ),
        Panel(
            title="Tokens",
            description="Tokens per second of the requests that ended.",
            queries=(
                Query(
                    q.total(q.rate(names.TOKEN_USAGE, suffix="_sum"), q.TOKEN_TYPE),
                    f"{{{{{q.TOKEN_TYPE}}}}}",
                ),
            ),
            unit=Unit.TOKENS_PER_SECOND,
        ),
        Panel(
            title="Prompt lengths",
            description="Input tokens per request.",
            queries=(Query(q.buckets(names.TOKEN_USAGE, f'{q.TOKEN_TYPE}="input"')),),
            unit=Unit.TOKENS,
            look=Look.HEATMAP,
        ),
        Panel(
            title="Output lengths",
            description="Output tokens per request.",
            queries=(Query(q.buckets(names.TOKEN_USAGE, f'{q.TOKEN_TYPE}="output"')),),
            unit=Unit.TOKENS,
            look=Look.HEATMAP,
        ),
    )


def _latency() -> tuple[Panel, ...]:
    def lines(title: str, description: str, metric: Metric, match: str = "") -> Panel:
        queries = percentiles(metric, match)
        return Panel(title=title, description=description, queries=queries, unit=Unit.SECONDS)

    def spread(title: str, metric: Metric, match: str = "") -> Panel:
        return Panel(
            title=title,
            description=f"{metric.description} Its distribution over time.",
            queries=(Query(q.buckets(metric, match)),),
            unit=Unit.SECONDS,
            look=Look.HEATMAP,
        )

    return (
        lines(
            "Time to first token",
            "From a request's arrival to its first output token: waiting and prefill.",
            names.TIME_TO_FIRST_TOKEN,
        ),
        lines(
            "Time per output token",
            "Mean inter-token latency of each answer after its first token.",
            names.TIME_PER_OUTPUT_TOKEN,
        ),
        lines(
            "End to end",
            "From arrival to last byte, of requests without error; grows with output lengths.",
            names.REQUEST_DURATION,
            ANSWERED,
        ),
        spread("Time to first token, spread", names.TIME_TO_FIRST_TOKEN),
        spread("Time per output token, spread", names.TIME_PER_OUTPUT_TOKEN),
        spread("End to end, spread", names.REQUEST_DURATION, ANSWERED),
    )


def _queue() -> tuple[Panel, ...]:
    model, reason = f"{{{{{q.MODEL}}}}}", q.label(names.REASON)
    return (
        waiting_and_running(),
        Panel(
            title="Waiting tokens",
            description="Prompt plus maximal output tokens of the waiting requests.",
            queries=(Query(q.same_everywhere(names.QUEUE_TOKENS), model),),
            unit=Unit.TOKENS,
            width=6,
        ),
        Panel(
            title="Age of the oldest",
            description="How long the first in the queue has waited.",
            queries=(
                Query(q.same_everywhere(names.QUEUE_OLDEST_AGE), model),
                Query(q.same_everywhere(names.QUEUE_OTHERS_OLDEST_AGE), f"others {model}"),
            ),
            unit=Unit.SECONDS,
            width=6,
        ),
        Panel(
            title="Admitted and refused",
            description=(
                "Requests put on the queue, all and of low priority, and refused by reason: "
                "queue_full is answered 503, tenant_limit and rate_limit 429, backend_unavailable "
                "means that Redis was not reached."
            ),
            queries=(
                Query(q.total(q.rate(names.QUEUE_ADMITTED)), "admitted"),
                Query(q.total(q.rate(names.QUEUE_LOW_PRIORITY_ADMITTED)), "admitted, low priority"),
                Query(q.total(q.rate(names.QUEUE_REJECTED), reason), f"{{{{{reason}}}}}"),
            ),
            unit=Unit.PER_SECOND,
            width=6,
        ),
        Panel(
            title="Low priority",
            description=(
                "Requests of low priority, such as those of batches, that wait and run, and "
                "batches behind their pace. They are part of all waiting and running requests."
            ),
            queries=(
                Query(q.same_everywhere(names.QUEUE_LOW_PRIORITY_DEPTH), f"waiting {model}"),
                Query(q.same_everywhere(names.QUEUE_LOW_PRIORITY_PENDING), f"running {model}"),
                Query(q.same_everywhere(names.BATCH_BEHIND), f"batches behind {model}"),
            ),
            width=12,
        ),
        Panel(
            title="Low priority: time used",
            description=(
                "The share of its time for which the oldest request of low priority has waited. "
                "From a half on, all of low priority ask for engines."
            ),
            queries=(Query(q.same_everywhere(names.QUEUE_LOW_PRIORITY_TIME_USED), model),),
            unit=Unit.SHARE,
            width=12,
        ),
    )


def waiting_and_running() -> Panel:
    model = f"{{{{{q.MODEL}}}}}"
    return Panel(
        title="Waiting and running",
        description="Requests that wait in the queue, and those that engines have taken.",
        queries=(
            Query(q.same_everywhere(names.QUEUE_DEPTH), f"waiting {model}"),
            Query(q.same_everywhere(names.QUEUE_PENDING), f"running {model}"),
        ),
        look=Look.STACKED,
        width=6,
    )


def _tenants() -> tuple[Panel, ...]:
    """The panels of tenants, which are empty without API keys."""
    tenant, reason = f"{{{{{q.TENANT}}}}}", q.label(names.REASON)
    requests = q.rate(names.REQUEST_DURATION, q.KNOWN_TENANT, "_count")
    tokens = q.rate(names.TOKEN_USAGE, q.KNOWN_TENANT, "_sum")
    waiting = q.quantile(0.95, names.TIME_TO_FIRST_TOKEN, q.KNOWN_TENANT, q.TENANT)
    refused = q.total(q.rate(names.QUEUE_REJECTED, q.KNOWN_TENANT), q.TENANT, reason)
    running = q.series(names.GATEWAY_REQUESTS_IN_FLIGHT, q.KNOWN_TENANT)
    stored = q.pods(names.STORE_USED.prometheus_name, q.KNOWN_TENANT)
    return (
        Panel(
            title="Requests by tenant",
            description="Requests that ended per second. This row needs API keys.",
            queries=(Query(q.total(requests, q.TENANT), tenant),),
            unit=Unit.PER_SECOND,
            look=Look.STACKED,
        ),
        Panel(
            title="Tokens by tenant",
            description="Input and output tokens per second of the requests that ended.",
            queries=(Query(q.total(tokens, q.TENANT), tenant),),
            unit=Unit.TOKENS_PER_SECOND,
            look=Look.STACKED,
        ),
        Panel(
            title="First token by tenant, p95",
            description="95th percentile of the time to first token: who waits for whom.",
            queries=(Query(waiting, tenant),),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="In flight by tenant",
            description="Requests that gateways are serving.",
            queries=(Query(q.total(running, q.TENANT), tenant),),
            look=Look.STACKED,
            width=6,
        ),
        Panel(
            title="Refused by tenant",
            description=(
                "Requests refused per second, by reason. rate_limit is a limit of the tenant's key."
            ),
            queries=(Query(refused, f"{tenant} {{{{{reason}}}}}"),),
            unit=Unit.PER_SECOND,
            look=Look.STACKED,
            width=6,
        ),
        Panel(
            title="Stored by tenant",
            description=(
                "Bytes that tenants store in Redis (stored requests, files, batches), and what one "
                "may store."
            ),
            queries=(
                Query(f"max by ({q.TENANT}) ({stored})", tenant),
                Query(f"min({q.pods(names.STORE_LIMIT.prometheus_name)})", "limit of each"),
            ),
            unit=Unit.BYTES,
            width=6,
        ),
        _keys(),
        _grammars(),
        _images(),
    )


def _keys() -> Panel:
    current = q.pods(names.GATEWAY_API_KEYS_CURRENT.prometheus_name)
    strangers = q.pods(names.GATEWAY_UNAUTHORIZED.prometheus_name)
    crowded = q.pods(names.GATEWAY_OPEN_REFUSED.prometheus_name)
    return Panel(
        title="API keys",
        description=(
            "Keys that gateways accept; gateways that cannot read their key file, so that earlier "
            "keys stay in use; requests per second without a valid key, and of tenants that have "
            "max_open_requests_per_tenant open ones."
        ),
        queries=(
            Query(f"max({q.pods(names.GATEWAY_API_KEYS.prometheus_name)})", "keys"),
            Query(f"count({current}) - sum({current})", "gateways with an unusable file"),
            Query(q.total(f"rate({strangers}[{q.WINDOW}])"), "refused per second"),
            Query(q.total(f"rate({crowded}[{q.WINDOW}])"), "too many open per second"),
        ),
        width=6,
    )


def _grammars() -> Panel:
    checks, result = q.pods(names.GATEWAY_GRAMMAR_CHECKS.prometheus_name), q.label(names.RESULT)
    return Panel(
        title="Grammar checks",
        description=(
            "Schemas, expressions and grammars per second that gateways had not seen before, by "
            "result. too_expensive and busy: a client sends grammars that take long to compile."
        ),
        queries=(Query(q.total(f"rate({checks}[{q.WINDOW}])", result), f"{{{{{result}}}}}"),),
        unit=Unit.PER_SECOND,
        look=Look.STACKED,
        width=12,
    )


def _images() -> Panel:
    images, result = q.pods(names.GATEWAY_IMAGES.prometheus_name), q.label(names.RESULT)
    return Panel(
        title="Images read by gateways",
        description=(
            "Images of requests and uploads per second, by result. known: the gateway had decoded "
            "an equal one of the tenant."
        ),
        queries=(Query(q.total(f"rate({images}[{q.WINDOW}])", result), f"{{{{{result}}}}}"),),
        unit=Unit.PER_SECOND,
        look=Look.STACKED,
        width=12,
    )


def _batches() -> tuple[Panel, ...]:
    """The panels of batches.

    Gauges are the same from every gateway; a request is counted by the gateway that leads its
    batch.
    """
    state, result = q.label(names.STATE), q.label(names.RESULT)
    open_ones = q.pods(names.BATCH_OPEN.prometheus_name)
    done = q.pods(names.BATCH_REQUESTS.prometheus_name)
    ended = q.pods(names.BATCH_ENDED.prometheus_name)
    return (
        Panel(
            title="Open batches",
            description="Batches that have not ended, by state.",
            queries=(Query(f"max by ({state}) ({open_ones})", f"{{{{{state}}}}}"),),
            look=Look.STACKED,
            width=6,
        ),
        Panel(
            title="Batch requests",
            description="Batch requests that got their result per second, and the remaining ones.",
            queries=(
                Query(q.total(f"rate({done}[{q.WINDOW}])", result), f"{{{{{result}}}}} per second"),
                Query(f"max({q.pods(names.BATCH_REQUESTS_LEFT.prometheus_name)})", "left"),
            ),
            width=6,
        ),
        Panel(
            title="Oldest batch",
            description="How long ago the oldest batch that has not ended was created.",
            queries=(Query(f"max({q.pods(names.BATCH_OLDEST_AGE.prometheus_name)})", "oldest"),),
            unit=Unit.SECONDS,
            width=6,
        ),
        Panel(
            title="Ended batches",
            description="Batches that ended, by state. Expired batches did not finish within their "
            "window.",
            queries=(Query(q.total(f"increase({ended}[{q.WINDOW}])", state), f"{{{{{state}}}}}"),),
            look=Look.BARS,
            width=6,
        ),
    )


def _faults() -> tuple[Panel, ...]:
    return (
        Panel(
            title="Disconnects and redeliveries",
            description=(
                "Clients that disconnected before the end; requests that another engine took over "
                "because theirs went silent."
            ),
            queries=(
                Query(q.total(q.increase(names.GATEWAY_DISCONNECTS)), "disconnects"),
                Query(q.total(q.increase(names.QUEUE_REDELIVERIES)), "redeliveries"),
            ),
            look=Look.BARS,
            width=8,
        ),
        Panel(
            title="Dead letters",
            description="Messages set aside because they cannot be served. Always worth a look.",
            queries=(
                Query(
                    f"max by ({q.MODEL}) ({q.increase(names.QUEUE_DEAD_LETTERS)})",
                    f"{{{{{q.MODEL}}}}}",
                ),
            ),
            look=Look.BARS,
            width=8,
        ),
        Panel(
            title="Clock offset",
            description="How far Redis' clock is from those of gateways and engines, the most and "
            "the least. Deadlines follow Redis'.",
            queries=(
                Query(f"max({q.pods(names.REDIS_CLOCK_OFFSET.prometheus_name)})", "most"),
                Query(f"min({q.pods(names.REDIS_CLOCK_OFFSET.prometheus_name)})", "least"),
            ),
            unit=Unit.SECONDS,
            width=8,
        ),
        Panel(
            title="Redis memory",
            description="Used, and the limit at which admission stops. Needs redis_exporter.",
            queries=(
                Query(f"max({q.pods(q.REDIS_MEMORY_USED)})", "used"),
                Query(f"max({q.pods(q.REDIS_MEMORY_MAX)}) > 0", "limit"),
            ),
            unit=Unit.BYTES,
            width=12,
        ),
        Panel(
            title="Redis commands",
            description="Commands per second, including those of scripts. Needs redis_exporter.",
            queries=(Query(q.total(f"rate({q.pods(q.REDIS_COMMANDS)}[{q.WINDOW}])"), "commands"),),
            unit=Unit.PER_SECOND,
            width=12,
        ),
    )
