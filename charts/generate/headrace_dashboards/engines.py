"""Inside the engines: batches, steps, KV cache, where requests spend their time."""

from headrace_common.observability import metric_names as names

from . import promql as q
from .panel import Dashboard, Look, Panel, Query, Row, Unit
from .service import percentiles, scope

_POD = f"{{{{{q.POD}}}}}"


def dashboard() -> Dashboard:
    return Dashboard(
        name="engines",
        title="Headrace / Engines",
        description="Continuous batching and the KV cache, engine by engine.",
        variables=scope(names.ENGINE_KV_UTILIZATION),
        rows=(
            Row("Batch", _batch()),
            Row("Steps", _steps()),
            Row("KV cache", _cache()),
            Row("Images", _images()),
            Row("Requests", _requests()),
            Row("Processes", _processes()),
            Row("Starts", _starts()),
            Row("Canary", _canary()),
            Row("Shared accelerators", _turns()),
        ),
    )


def _batch() -> tuple[Panel, ...]:
    state, kind = q.label(names.STATE), q.label(names.TYPE)
    sequences = q.series(names.ENGINE_REQUESTS)
    running = q.series(names.ENGINE_REQUESTS, f'{state}="running"')
    return (
        Panel(
            title="Sequences",
            description="Running sequences form the batch; waiting ones do not fit yet.",
            queries=(Query(q.total(sequences, state), f"{{{{{state}}}}}"),),
            look=Look.STACKED,
        ),
        Panel(
            title="Batch size by engine",
            description="Sequences that each engine computes in a step, and the maximum.",
            queries=(
                Query(q.total(running, q.POD), _POD),
                Query(f"max({q.series(names.ENGINE_CAPACITY)})", "at most"),
            ),
        ),
        Panel(
            title="Tokens",
            description="Prompt tokens received and output tokens generated per second.",
            queries=(Query(q.total(q.rate(names.ENGINE_TOKENS), kind), f"{{{{{kind}}}}}"),),
            unit=Unit.TOKENS_PER_SECOND,
        ),
    )


def _steps() -> tuple[Panel, ...]:
    phase = q.label(names.PHASE)
    return (
        Panel(
            title="Step time",
            description="Duration of an engine step, which determines the inter-token latency.",
            queries=percentiles(names.ENGINE_STEP_DURATION),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Step time, spread",
            description="Distribution of step durations over time.",
            queries=(Query(q.buckets(names.ENGINE_STEP_DURATION)),),
            unit=Unit.SECONDS,
            look=Look.HEATMAP,
        ),
        Panel(
            title="Tokens per step",
            description="Mean over the steps that had tokens of that phase.",
            queries=(Query(q.mean(names.ENGINE_STEP_TOKENS, "", phase), f"{{{{{phase}}}}}"),),
            unit=Unit.TOKENS,
        ),
        Panel(
            title="Decode tokens per step, spread",
            description="Distribution of the decode tokens in a step over time.",
            queries=(Query(q.buckets(names.ENGINE_STEP_TOKENS, f'{phase}="decode"')),),
            unit=Unit.TOKENS,
            look=Look.HEATMAP,
        ),
        Panel(
            title="Steps",
            description="Steps per second of each engine.",
            queries=(
                Query(q.total(q.rate(names.ENGINE_STEP_DURATION, suffix="_count"), q.POD), _POD),
            ),
            unit=Unit.PER_SECOND,
        ),
        Panel(
            title="Time since the last step",
            description="Only while there is work. An engine whose time keeps growing is stuck.",
            queries=(Query(f"max by ({q.POD}) ({q.series(names.ENGINE_STEP_LAST_AGE)})", _POD),),
            unit=Unit.SECONDS,
        ),
    )


def _cache() -> tuple[Panel, ...]:
    state, place, kind = q.label(names.STATE), q.label(names.PLACE), q.label(names.KIND)
    blocks = q.total(q.series(names.ENGINE_KV_BLOCKS), state, place)
    return (
        Panel(
            title="KV utilisation",
            description="Share of blocks in use by sequences, without cached blocks.",
            queries=(Query(f"max by ({q.POD}) ({q.series(names.ENGINE_KV_UTILIZATION)})", _POD),),
            unit=Unit.SHARE,
            maximum=1,
        ),
        Panel(
            title="KV blocks",
            description="Blocks of all engines: used by sequences, cached for prefixes, free.",
            queries=(Query(blocks, f"{{{{{state}}}}} {{{{{place}}}}}"),),
            look=Look.STACKED,
        ),
        Panel(
            title="Preemptions",
            description="Sequences per second that gave up their KV blocks to others.",
            queries=(
                Query(
                    q.total(q.rate(names.ENGINE_PREEMPTIONS), q.POD, kind), f"{_POD} {{{{{kind}}}}}"
                ),
            ),
            unit=Unit.PER_SECOND,
        ),
        Panel(
            title="Prefix hit rate",
            description="Share of prompt tokens whose KV was found in the prefix cache.",
            queries=(Query(_share_of(names.ENGINE_PREFIX_CACHE_TOKENS, "hit"), "hit rate"),),
            unit=Unit.SHARE,
            maximum=1,
        ),
        Panel(
            title="Prefix lookups",
            description="Prompt tokens per second looked up in the prefix cache, by result.",
            queries=(_by_result(names.ENGINE_PREFIX_CACHE_TOKENS),),
            unit=Unit.TOKENS_PER_SECOND,
            look=Look.STACKED,
        ),
        Panel(
            title="Speculation",
            description="Drafted tokens per second, by whether they were accepted.",
            queries=(_by_result(names.ENGINE_SPEC_TOKENS),),
            unit=Unit.TOKENS_PER_SECOND,
            look=Look.STACKED,
        ),
        Panel(
            title="KV waste",
            description="Unused slots of used blocks, divided by used slots.",
            queries=(Query(f"max by ({q.POD}) ({q.series(names.ENGINE_KV_WASTE)})", _POD),),
            unit=Unit.SHARE,
        ),
        Panel(
            title="Copied KV",
            description="Bytes per second copied to host memory and to the shared tier (out), and "
            "back (in).",
            queries=(
                Query(q.total(q.rate(names.ENGINE_KV_SWAPPED), kind), f"host {{{{{kind}}}}}"),
                Query(q.total(q.rate(names.ENGINE_KV_SHARED), kind), f"shared {{{{{kind}}}}}"),
            ),
            unit=Unit.BYTES_PER_SECOND,
        ),
        Panel(
            title="Prefix hits by place",
            description="Prompt tokens per second whose KV was found: on the device, in host "
            "memory, in the shared tier.",
            queries=(
                Query(q.total(q.rate(names.ENGINE_PREFIX_CACHE_HITS), place), f"{{{{{place}}}}}"),
            ),
            unit=Unit.TOKENS_PER_SECOND,
            look=Look.STACKED,
        ),
        Panel(
            title="Shared KV lookups",
            description="Blocks per second in the shared tier: found (hit) or not (miss), found "
            "but not read (failed), not written (skipped).",
            queries=(_by_result(names.ENGINE_KV_SHARED_BLOCKS),),
            unit=Unit.PER_SECOND,
            look=Look.STACKED,
        ),
        Panel(
            title="Time of KV copies",
            description="Seconds per second in which steps waited for host memory, and in which "
            "threads read the shared tier.",
            queries=(Query(q.total(q.rate(names.ENGINE_KV_COPY_TIME), place), f"{{{{{place}}}}}"),),
        ),
        Panel(
            title="Hand-overs",
            description="Seconds from the decision to hand a request over until another engine may "
            "take it.",
            queries=percentiles(names.ENGINE_HANDOVER_DURATION),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Tokens handed over",
            description="Tokens per second whose KV was handed over to other engines.",
            queries=(Query(q.total(q.rate(names.ENGINE_HANDOVER_TOKENS), q.POD), _POD),),
            unit=Unit.TOKENS_PER_SECOND,
            width=6,
        ),
        Panel(
            title="KV handed over",
            description="Bytes per second of this KV.",
            queries=(Query(q.total(q.rate(names.ENGINE_HANDOVER_KV), q.POD), _POD),),
            unit=Unit.BYTES_PER_SECOND,
            width=6,
        ),
        Panel(
            title="Placement",
            description="Requests taken per second: by the engine that probably has their start "
            "cached (placed), by another one (stolen), or by any engine (unplaced).",
            queries=(_by_result(names.QUEUE_PLACEMENTS),),
            unit=Unit.PER_SECOND,
            look=Look.STACKED,
            width=6,
        ),
        Panel(
            title="Cached tokens by placement",
            description="Share of placed prompts' tokens that some engine had cached, as engines "
            "tell (known); that the engine that took the request had, as it told (expected); and "
            "that were found there (found).",
            queries=tuple(
                Query(q.ratio(_placed(kind), _placed("prompt")), kind)
                for kind in ("known", "expected", "found")
            ),
            unit=Unit.SHARE,
            width=6,
        ),
    )


def _placed(kind: str) -> str:
    """Tokens of placed prompts per second, of all gateways."""
    return q.total(q.rate(names.GATEWAY_PLACEMENT_TOKENS, f'{q.label(names.KIND)}="{kind}"'))


def _canary() -> tuple[Panel, ...]:
    variant = q.label(names.VARIANT)
    side = f"{{{{{variant}}}}}"
    failed = q.total(q.rate(names.ENGINE_REQUESTS_ENDED, f'{q.CODE}!=""'), variant)
    return (
        Panel(
            title="Failures by side",
            description="Share of the requests of each side of a canary that failed.",
            queries=(
                Query(q.ratio(failed, q.total(q.rate(names.ENGINE_REQUESTS_ENDED), variant)), side),
            ),
            unit=Unit.SHARE,
        ),
        Panel(
            title="First token by side",
            description="Time from admission to the first token: 95th percentile of each side.",
            queries=(Query(q.quantile(0.95, names.ENGINE_TIME_TO_FIRST_TOKEN, "", variant), side),),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Time per token by side",
            description="Time per output token after the first: 95th percentile of each side.",
            queries=(
                Query(q.quantile(0.95, names.ENGINE_TIME_PER_OUTPUT_TOKEN, "", variant), side),
            ),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Equal answers",
            description="Share of the greedy requests, repeated on a canary, whose answers were "
            "those of the stable engines.",
            queries=(Query(_equal_answers(), "equal"),),
            unit=Unit.SHARE,
            width=12,
        ),
        Panel(
            title="First difference",
            description="Output tokens before the first difference, of answers that were "
            "different: median.",
            queries=(Query(q.quantile(0.5, names.GATEWAY_CANARY_FIRST_DIFFERENCE), "tokens"),),
            width=12,
        ),
    )


def _turns() -> tuple[Panel, ...]:
    model = f"{{{{{q.MODEL}}}}}"
    awake = q.total(q.pods(q.SLEEP_STATE, 'sleep_state="awake"'), "model_name")
    return (
        Panel(
            title="Awake engines",
            description="Engines of each model that are awake; of those that share an accelerator "
            "one at a time.",
            queries=(Query(awake, "{{model_name}}"),),
        ),
        Panel(
            title="Turns",
            description="Turns per second on shared accelerators, by the model that woke for it.",
            queries=(Query(q.total(q.rate(names.ENGINE_TURNS), q.MODEL), model),),
            unit=Unit.PER_SECOND,
        ),
        Panel(
            title="Wait for a turn",
            description="Time that requests waited until their model's engine began to wake: 95th "
            "percentile of the turns.",
            queries=(Query(q.quantile(0.95, names.ENGINE_TURN_WAIT, "", q.MODEL), model),),
            unit=Unit.SECONDS,
        ),
    )


def _equal_answers() -> str:
    result = q.label(names.RESULT)
    equal, compared = (
        q.total(q.rate(names.GATEWAY_CANARY_COMPARISONS, f"{result}{matcher}"))
        for matcher in ('="equal"', '!="unanswered"')
    )
    return q.ratio(equal, compared)


def _share_of(metric: names.Metric, result: str) -> str:
    part = q.rate(metric, f'{q.label(names.RESULT)}="{result}"')
    return q.ratio(q.total(part), q.total(q.rate(metric)))


def _by_result(metric: names.Metric) -> Query:
    result = q.label(names.RESULT)
    return Query(q.total(q.rate(metric), result), f"{{{{{result}}}}}")


def _images() -> tuple[Panel, ...]:
    return (
        Panel(
            title="Images",
            description="Images per second that prompts began to read, by whether they were "
            "encoded already (hit) or not (miss), and images that were encoded.",
            queries=(
                _by_result(names.ENGINE_ENCODER_CACHE_IMAGES),
                Query(q.total(q.rate(names.ENGINE_ENCODER_IMAGES)), "encoded"),
            ),
            unit=Unit.PER_SECOND,
        ),
        Panel(
            title="Time of images",
            description="Seconds per second in which steps of each engine encoded images.",
            queries=(Query(q.total(q.rate(names.ENGINE_ENCODER_TIME), q.POD), _POD),),
        ),
        Panel(
            title="Image tokens",
            description="Prompt tokens per second of the images that each engine encoded.",
            queries=(Query(q.total(q.rate(names.ENGINE_ENCODER_TOKENS), q.POD), _POD),),
            unit=Unit.TOKENS_PER_SECOND,
        ),
    )


def _requests() -> tuple[Panel, ...]:
    phases = (
        ("queue", "Time in the queue", "From admission until an engine took the request."),
        ("prefill", "Time in prefill", "From the take to the first output token."),
        ("decode", "Time in decode", "From the first output token to the last."),
    )
    return tuple(
        Panel(
            title=title,
            description=description,
            queries=percentiles(
                names.ENGINE_REQUEST_PHASE_DURATION, f'{q.label(names.PHASE)}="{phase}"'
            ),
            unit=Unit.SECONDS,
        )
        for phase, title, description in phases
    )


def _processes() -> tuple[Panel, ...]:
    engines = f"and on ({q.NAMESPACE}, {q.POD}) {q.series(names.ENGINE_KV_UTILIZATION)}"
    return (
        Panel(
            title="CPU",
            description="Cores that each engine process uses.",
            queries=(Query(f"rate({q.pods(q.PROCESS_CPU)}[{q.WINDOW}]) {engines}", _POD),),
            width=12,
        ),
        Panel(
            title="Memory",
            description="Resident memory of each engine process, without the GPU's.",
            queries=(Query(f"{q.pods(q.PROCESS_MEMORY)} {engines}", _POD),),
            unit=Unit.BYTES,
            width=12,
        ),
    )


def _starts() -> tuple[Panel, ...]:
    phase, seconds = q.label(names.PHASE), q.series(names.ENGINE_START_DURATION)
    return (
        Panel(
            title="Phases of the start",
            description="Where the time went between the start of a process and its first request: "
            "the mean of the present engines.",
            queries=(Query(f"avg by ({phase}) ({seconds})", f"{{{{{phase}}}}}"),),
            unit=Unit.SECONDS,
            look=Look.STACKED,
            width=12,
        ),
        Panel(
            title="Start by engine",
            description="Time from the start of an engine's process until it took work. The cold "
            "starts of the operator's dashboard include what Kubernetes did before.",
            queries=(Query(q.total(seconds, q.POD), _POD),),
            unit=Unit.SECONDS,
            width=12,
        ),
    )
