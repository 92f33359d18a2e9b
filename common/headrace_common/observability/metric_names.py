"""Every metric, span and attribute name that Headrace exports, with units and histogram buckets.

Established names are preferred: OpenTelemetry's GenAI semantic conventions for requests and tokens,
vLLM's (`vllm:`) for the gauges that routers such as the Gateway API inference extension scrape.
Only constants: nothing here imports OpenTelemetry or records anything.
"""

from dataclasses import dataclass
from enum import StrEnum

_PROMETHEUS_UNITS = {"s": "_seconds", "By": "_bytes"}


class MetricKind(StrEnum):
    COUNTER = "counter"
    UP_DOWN_COUNTER = "up_down_counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `unit` is UCUM (`s`, `{token}`), `buckets` are a histogram's upper edges."""

    name: str
    kind: MetricKind
    unit: str
    description: str
    buckets: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """The name on the Prometheus endpoint; a histogram adds `_bucket`, `_sum`, `_count`."""
        base = self.name.replace(".", "_") + _PROMETHEUS_UNITS.get(self.unit, "")
        return f"{base}_total" if self.kind is MetricKind.COUNTER else base


# The conventions' edges, with larger ones added: long generations would all fall into the last
# bucket.
_REQUEST_SECONDS = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    *(163.84, 327.68, 655.36, 1310.72, 2621.44, 5242.88),
)
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_OUTPUT_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_TOKEN_COUNTS = tuple(float(4**power) for power in range(14))
_PHASE_SECONDS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512),
    *(1.024, 2.048, 4.096, 8.192, 16.384, 32.768, 65.536),
)
_STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0,
                16384.0)  # fmt: skip

# OpenTelemetry GenAI semantic conventions, recorded by the gateway.
REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    MetricKind.HISTOGRAM,
    "s",
    "Time from a request's arrival to its last byte.",
    _REQUEST_SECONDS,
)
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    MetricKind.HISTOGRAM,
    "s",
    "Time from a request's arrival to its first output token.",
    _FIRST_TOKEN_SECONDS,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token",
    MetricKind.HISTOGRAM,
    "s",
    "Mean time per output token after the first, one value a choice.",
    _OUTPUT_TOKEN_SECONDS,
)
TOKEN_USAGE = Metric(
    "gen_ai.client.token.usage",
    MetricKind.HISTOGRAM,
    "{token}",
    "Input and output tokens of a request.",
    _TOKEN_COUNTS,
)

# The queue. Every gateway reads the same queue: use the max, not the sum, of its gauges over
# gateways.
QUEUE_DEPTH = Metric(
    "headrace.queue.depth",
    MetricKind.GAUGE,
    "{request}",
    "Requests that wait in a model's queue (the same value from every gateway).",
)
QUEUE_TOKENS = Metric(
    "headrace.queue.tokens",
    MetricKind.GAUGE,
    "{token}",
    "Prompt plus maximal output tokens of the waiting requests (the same from every gateway).",
)
QUEUE_PENDING = Metric(
    "headrace.queue.pending",
    MetricKind.GAUGE,
    "{request}",
    "Requests that engines have taken and not ended (the same value from every gateway).",
)
QUEUE_OLDEST_AGE = Metric(
    "headrace.queue.oldest_age",
    MetricKind.GAUGE,
    "s",
    "Age of the oldest waiting request (the same value from every gateway).",
)
QUEUE_LOW_PRIORITY_DEPTH = Metric(
    "headrace.queue.low_priority.depth",
    MetricKind.GAUGE,
    "{request}",
    "Waiting requests of low priority, such as those of batches (the same from every gateway).",
)
QUEUE_LOW_PRIORITY_PENDING = Metric(
    "headrace.queue.low_priority.pending",
    MetricKind.GAUGE,
    "{request}",
    "Requests of low priority that engines have taken and not ended (the same from every gateway).",
)
QUEUE_LOW_PRIORITY_TIME_USED = Metric(
    "headrace.queue.low_priority.time_used",
    MetricKind.GAUGE,
    "1",
    "Share of the time until its deadline for which the oldest waiting request of low priority has "
    "waited (the same from every gateway).",
)
QUEUE_LOW_PRIORITY_ADMITTED = Metric(
    "headrace.queue.low_priority.admitted",
    MetricKind.COUNTER,
    "{request}",
    "Requests of low priority that this gateway put on the queue.",
)
QUEUE_OTHERS_OLDEST_AGE = Metric(
    "headrace.queue.others.oldest_age",
    MetricKind.GAUGE,
    "s",
    "Age of the oldest waiting request that is not of low priority (the same from every gateway).",
)
QUEUE_ADMITTED = Metric(
    "headrace.queue.admitted",
    MetricKind.COUNTER,
    "{request}",
    "Requests that this gateway put on the queue.",
)
QUEUE_REJECTED = Metric(
    "headrace.queue.rejected",
    MetricKind.COUNTER,
    "{request}",
    "Requests that this gateway refused, by reason.",
)
QUEUE_REDELIVERIES = Metric(
    "headrace.queue.redeliveries",
    MetricKind.COUNTER,
    "{request}",
    "Requests that this engine took over from one that went silent or gave them back.",
)
QUEUE_PLACEMENTS = Metric(
    "headrace.queue.placements",
    MetricKind.COUNTER,
    "{request}",
    "Requests that this engine took first, by result: placed (with it), stolen (placed with "
    "another), unplaced. How much of prompts was cached is headrace.engine.prefix_cache.tokens.",
)
QUEUE_DEAD_LETTERS = Metric(
    "headrace.queue.dead_letters",
    MetricKind.COUNTER,
    "{message}",
    "Messages set aside since they cannot be served; every gateway reports the same.",
)

# Metrics of each process that reads deadlines.
REDIS_CLOCK_OFFSET = Metric(
    "headrace.redis.clock_offset",
    MetricKind.GAUGE,
    "s",
    "Seconds that Redis' clock is ahead of this process's machine's (below 0: behind it).",
)

# Batches. The gauges are read from Redis and the same from every gateway, as those of the queue;
# the gateway that leads a batch adds to the counters.
BATCH_OPEN = Metric(
    "headrace.batch.open",
    MetricKind.GAUGE,
    "{batch}",
    "Batches that have not ended, by state: validating (also: waiting for a gateway), in_progress, "
    "finalizing, cancelling (the same value from every gateway).",
)
BATCH_REQUESTS_LEFT = Metric(
    "headrace.batch.requests.left",
    MetricKind.GAUGE,
    "{request}",
    "Requests of batches in progress that have no result yet (the same value from every gateway).",
)
BATCH_OLDEST_AGE = Metric(
    "headrace.batch.oldest_age",
    MetricKind.GAUGE,
    "s",
    "Age of the oldest batch that has not ended; 0 without one (the same from every gateway).",
)
BATCH_BEHIND = Metric(
    "headrace.batch.behind",
    MetricKind.GAUGE,
    "{batch}",
    "Batches with requests for a model that are behind the pace that ends them in time (the same "
    "value from every gateway).",
)
BATCH_REQUESTS = Metric(
    "headrace.batch.requests",
    MetricKind.COUNTER,
    "{request}",
    "Requests of batches whose result this gateway wrote, by result (completed, failed).",
)
BATCH_ENDED = Metric(
    "headrace.batch.ended",
    MetricKind.COUNTER,
    "{batch}",
    "Batches that ended at this gateway, by state (completed, failed, expired, cancelled).",
)

# The stored data of tenants, read from Redis; every gateway exports the same values.
STORE_USED = Metric(
    "headrace.store.used",
    MetricKind.GAUGE,
    "By",
    "Bytes that tenants store in Redis: stored requests, files, batches (the same value from every "
    "gateway).",
)
STORE_LIMIT = Metric(
    "headrace.store.limit",
    MetricKind.GAUGE,
    "By",
    "Bytes that one tenant may store in Redis, as set for this gateway.",
)

# The gateway's connections.
GATEWAY_DISCONNECTS = Metric(
    "headrace.gateway.disconnects",
    MetricKind.COUNTER,
    "{request}",
    "Requests whose client went away before the end.",
)
GATEWAY_REQUESTS_IN_FLIGHT = Metric(
    "headrace.gateway.requests.in_flight",
    MetricKind.UP_DOWN_COUNTER,
    "{request}",
    "Requests that this gateway is serving, by whether they stream.",
)
GATEWAY_API_KEYS = Metric(
    "headrace.gateway.api_keys",
    MetricKind.GAUGE,
    "{key}",
    "API keys that this gateway accepts; absent without API keys.",
)
GATEWAY_API_KEYS_CURRENT = Metric(
    "headrace.gateway.api_keys.current",
    MetricKind.GAUGE,
    "1",
    "1 if the keys are those of their file, 0 if it cannot be read and earlier keys stay in use.",
)
GATEWAY_UNAUTHORIZED = Metric(
    "headrace.gateway.unauthorized",
    MetricKind.COUNTER,
    "{request}",
    "Requests that were refused because they had no valid API key.",
)
GATEWAY_OPEN_REFUSED = Metric(
    "headrace.gateway.open_requests.refused",
    MetricKind.COUNTER,
    "{request}",
    "Requests that were refused because their tenant had max_open_requests_per_tenant open ones.",
)
GATEWAY_PLACEMENT_TOKENS = Metric(
    "headrace.gateway.placement.tokens",
    MetricKind.COUNTER,
    "{token}",
    "Tokens of prompts that this gateway placed, by kind: prompt (all), known (cached by some "
    "engine, as engines tell), expected (cached by the engine that took the request, as it told), "
    "found (that it had cached).",
)
GATEWAY_CANARY_COMPARISONS = Metric(
    "headrace.gateway.canary.comparisons",
    MetricKind.COUNTER,
    "{request}",
    "Greedy requests of stable engines that this gateway repeated on a canary, by result: equal, "
    "different, unanswered (not in time, or the repetition failed).",
)
GATEWAY_CANARY_FIRST_DIFFERENCE = Metric(
    "headrace.gateway.canary.first_difference",
    MetricKind.HISTOGRAM,
    "{token}",
    "Output tokens before the first difference, of answers of a canary that were different.",
    _STEP_TOKENS,
)
GATEWAY_GRAMMAR_CHECKS = Metric(
    "headrace.gateway.grammar_checks",
    MetricKind.COUNTER,
    "{grammar}",
    "Schemas, expressions and grammars that were not known to be good, by result: good, invalid, "
    "too_expensive, remembered (too expensive before), busy.",
)
GATEWAY_IMAGES = Metric(
    "headrace.gateway.images",
    MetricKind.COUNTER,
    "{image}",
    "Images of requests and uploads, by result: decoded, known (in memory, or just being decoded "
    "for an equal one), refused.",
)

# The engine.
ENGINE_START_DURATION = Metric(
    "headrace.engine.start.duration",
    MetricKind.GAUGE,
    "s",
    "Time that each phase of this engine's start took, by phase; their sum is the time from the "
    "process's start until it took work.",
)
ENGINE_REQUESTS = Metric(
    "headrace.engine.requests",
    MetricKind.GAUGE,
    "{request}",
    "Sequences in the engine's scheduler, by state.",
)
ENGINE_CAPACITY = Metric(
    "headrace.engine.capacity",
    MetricKind.GAUGE,
    "{sequence}",
    "The most sequences that this engine runs at once.",
)
ENGINE_KV_UTILIZATION = Metric(
    "headrace.engine.kv.utilization",
    MetricKind.GAUGE,
    "1",
    "Share of KV blocks in use by sequences, 0 to 1.",
)
ENGINE_KV_BLOCKS = Metric(
    "headrace.engine.kv.blocks",
    MetricKind.GAUGE,
    "{block}",
    "KV blocks by state (used, cached, free) and place (device, host).",
)
ENGINE_KV_WASTE = Metric(
    "headrace.engine.kv.waste",
    MetricKind.GAUGE,
    "1",
    "Token positions of used KV blocks that hold nothing, over those that hold something.",
)
ENGINE_KV_SWAPPED = Metric(
    "headrace.engine.kv.swapped",
    MetricKind.COUNTER,
    "By",
    "KV copied to host memory and back, by kind (out, in).",
)
ENGINE_KV_SHARED = Metric(
    "headrace.engine.kv.shared",
    MetricKind.COUNTER,
    "By",
    "KV written to the shared tier and read from it, by kind (out, in).",
)
ENGINE_KV_SHARED_BLOCKS = Metric(
    "headrace.engine.kv.shared.blocks",
    MetricKind.COUNTER,
    "{block}",
    "KV blocks looked up in the shared tier (hit, miss), found but not read (failed), or not "
    "written (skipped), by result.",
)
ENGINE_KV_COPY_TIME = Metric(
    "headrace.engine.kv.copy.time",
    MetricKind.COUNTER,
    "s",
    "Time of copies of KV, by place: host (steps waited for these), shared (reading in threads).",
)
ENGINE_HANDOVER_TOKENS = Metric(
    "headrace.engine.handover.tokens",
    MetricKind.COUNTER,
    "{token}",
    "Tokens whose KV was handed over to other engines.",
)
ENGINE_HANDOVER_KV = Metric(
    "headrace.engine.handover.kv",
    MetricKind.COUNTER,
    "By",
    "Bytes of this KV.",
)
ENGINE_HANDOVER_DURATION = Metric(
    "headrace.engine.handover.duration",
    MetricKind.HISTOGRAM,
    "s",
    "Time from the decision to hand a request over until another engine may take it.",
    _FIRST_TOKEN_SECONDS,
)
ENGINE_STEP_DURATION = Metric(
    "headrace.engine.step.duration",
    MetricKind.HISTOGRAM,
    "s",
    "Duration of one engine step.",
    _STEP_SECONDS,
)
ENGINE_STEP_TOKENS = Metric(
    "headrace.engine.step.tokens",
    MetricKind.HISTOGRAM,
    "{token}",
    "Tokens computed in one step, by phase.",
    _STEP_TOKENS,
)
ENGINE_STEP_LAST_AGE = Metric(
    "headrace.engine.step.last_age",
    MetricKind.GAUGE,
    "s",
    "Time since the last finished step while there is work; 0 while idle.",
)
ENGINE_REQUEST_PHASE_DURATION = Metric(
    "headrace.engine.request.phase.duration",
    MetricKind.HISTOGRAM,
    "s",
    "Time that a request spent in a phase: queue, compile, prefill, decode.",
    _PHASE_SECONDS,
)
# Of each side of a canary (VARIANT). The first token's time counts from the request's admission.
ENGINE_REQUESTS_ENDED = Metric(
    "headrace.engine.requests.ended",
    MetricKind.COUNTER,
    "{request}",
    "Requests that an engine has ended, by variant and by the error with which they failed.",
)
ENGINE_TIME_TO_FIRST_TOKEN = Metric(
    "headrace.engine.time_to_first_token",
    MetricKind.HISTOGRAM,
    "s",
    "Time from a request's admission to its first output token, by variant.",
    _FIRST_TOKEN_SECONDS,
)
ENGINE_TIME_PER_OUTPUT_TOKEN = Metric(
    "headrace.engine.time_per_output_token",
    MetricKind.HISTOGRAM,
    "s",
    "Mean time per output token after the first, one value a request, by variant.",
    _OUTPUT_TOKEN_SECONDS,
)
# Of engines that take turns on a shared accelerator.
ENGINE_TURNS = Metric(
    "headrace.engine.turns",
    MetricKind.COUNTER,
    "{turn}",
    "Times that this engine woke for its turn on a shared accelerator.",
)
ENGINE_TURN_WAIT = Metric(
    "headrace.engine.turn.wait",
    MetricKind.HISTOGRAM,
    "s",
    "Time that requests waited for a turn of this engine before it began to wake: the oldest one, "
    "since it came or since the turn before.",
    _PHASE_SECONDS,
)
ENGINE_PREEMPTIONS = Metric(
    "headrace.engine.preemptions",
    MetricKind.COUNTER,
    "{preemption}",
    "Sequences that gave up their KV blocks, by kind.",
)
ENGINE_PREFIX_CACHE_TOKENS = Metric(
    "headrace.engine.prefix_cache.tokens",
    MetricKind.COUNTER,
    "{token}",
    "Prompt tokens looked up in the prefix cache, by result.",
)
ENGINE_PREFIX_CACHE_HITS = Metric(
    "headrace.engine.prefix_cache.hits",
    MetricKind.COUNTER,
    "{token}",
    "Prompt tokens found in the prefix cache, by place (device, host, shared).",
)
ENGINE_ENCODER_IMAGES = Metric(
    "headrace.engine.encoder.images",
    MetricKind.COUNTER,
    "{image}",
    "Images that the vision tower has encoded.",
)
ENGINE_ENCODER_TOKENS = Metric(
    "headrace.engine.encoder.tokens",
    MetricKind.COUNTER,
    "{token}",
    "Prompt tokens of these images.",
)
ENGINE_ENCODER_TIME = Metric(
    "headrace.engine.encoder.time",
    MetricKind.COUNTER,
    "s",
    "Time in which steps encoded these images.",
)
ENGINE_ENCODER_CACHE_IMAGES = Metric(
    "headrace.engine.encoder_cache.images",
    MetricKind.COUNTER,
    "{image}",
    "Images that prompts began to read, by result: hit (they were encoded already), miss.",
)
ENGINE_SPEC_TOKENS = Metric(
    "headrace.engine.spec.tokens",
    MetricKind.COUNTER,
    "{token}",
    "Drafted tokens of speculative decoding, by result (accepted, rejected); absent without it.",
)
ENGINE_TOKENS = Metric(
    "headrace.engine.tokens",
    MetricKind.COUNTER,
    "{token}",
    "Prompt tokens taken in and output tokens made, by type.",
)

# The operator. All carry the served model and, as K8S_NAMESPACE, where its ModelService is.
OPERATOR_REPLICAS = Metric(
    "headrace.operator.replicas",
    MetricKind.GAUGE,
    "{replica}",
    "Engine replicas by kind (desired, ready).",
)
OPERATOR_DECISIONS = Metric(
    "headrace.operator.decisions",
    MetricKind.COUNTER,
    "{decision}",
    "Scaling decisions by reason.",
)
OPERATOR_SIGNAL = Metric(
    "headrace.operator.signal",
    MetricKind.GAUGE,
    "",
    "Present value of a scaling signal, by signal; absent while it cannot be read.",
)
OPERATOR_SIGNAL_TARGET = Metric(
    "headrace.operator.signal.target",
    MetricKind.GAUGE,
    "",
    "Value of a scaling signal above which replicas are added, by signal.",
)
OPERATOR_COLD_START_DURATION = Metric(
    "headrace.operator.cold_start.duration",
    MetricKind.HISTOGRAM,
    "s",
    "Time from an engine pod's creation until it is ready.",
    _PHASE_SECONDS,
)
OPERATOR_RECONCILES = Metric(
    "headrace.operator.reconciles",
    MetricKind.COUNTER,
    "{reconcile}",
    "Finished reconciliations of a ModelService, by result (ok, error).",
)

GATEWAY_METRICS = (
    REQUEST_DURATION,
    TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    TOKEN_USAGE,
    QUEUE_DEPTH,
    QUEUE_TOKENS,
    QUEUE_PENDING,
    QUEUE_OLDEST_AGE,
    QUEUE_LOW_PRIORITY_DEPTH,
    QUEUE_LOW_PRIORITY_PENDING,
    QUEUE_LOW_PRIORITY_TIME_USED,
    QUEUE_LOW_PRIORITY_ADMITTED,
    QUEUE_OTHERS_OLDEST_AGE,
    QUEUE_ADMITTED,
    QUEUE_REJECTED,
    QUEUE_DEAD_LETTERS,
    BATCH_OPEN,
    BATCH_REQUESTS_LEFT,
    BATCH_OLDEST_AGE,
    BATCH_BEHIND,
    BATCH_REQUESTS,
    BATCH_ENDED,
    STORE_USED,
    STORE_LIMIT,
    GATEWAY_DISCONNECTS,
    GATEWAY_REQUESTS_IN_FLIGHT,
    GATEWAY_API_KEYS,
    GATEWAY_API_KEYS_CURRENT,
    GATEWAY_UNAUTHORIZED,
    GATEWAY_OPEN_REFUSED,
    GATEWAY_GRAMMAR_CHECKS,
    GATEWAY_IMAGES,
    GATEWAY_PLACEMENT_TOKENS,
    GATEWAY_CANARY_COMPARISONS,
    GATEWAY_CANARY_FIRST_DIFFERENCE,
)
# With API keys on, these carry TENANT_LABEL: the tenants of the keys, or OTHER_TENANTS. The others
# do not, because their histograms would have too many series.
TENANT_METRICS = (
    REQUEST_DURATION,
    TIME_TO_FIRST_TOKEN,
    TOKEN_USAGE,
    QUEUE_ADMITTED,
    QUEUE_REJECTED,
    STORE_USED,
    GATEWAY_REQUESTS_IN_FLIGHT,
    GATEWAY_OPEN_REFUSED,
)
ENGINE_METRICS = (
    QUEUE_REDELIVERIES,
    QUEUE_PLACEMENTS,
    ENGINE_START_DURATION,
    ENGINE_REQUESTS,
    ENGINE_CAPACITY,
    ENGINE_KV_UTILIZATION,
    ENGINE_KV_BLOCKS,
    ENGINE_KV_WASTE,
    ENGINE_KV_SWAPPED,
    ENGINE_KV_SHARED,
    ENGINE_KV_SHARED_BLOCKS,
    ENGINE_KV_COPY_TIME,
    ENGINE_HANDOVER_TOKENS,
    ENGINE_HANDOVER_KV,
    ENGINE_HANDOVER_DURATION,
    ENGINE_STEP_DURATION,
    ENGINE_STEP_TOKENS,
    ENGINE_STEP_LAST_AGE,
    ENGINE_REQUEST_PHASE_DURATION,
    ENGINE_REQUESTS_ENDED,
    ENGINE_TIME_TO_FIRST_TOKEN,
    ENGINE_TIME_PER_OUTPUT_TOKEN,
    ENGINE_TURNS,
    ENGINE_TURN_WAIT,
    ENGINE_PREEMPTIONS,
    ENGINE_PREFIX_CACHE_TOKENS,
    ENGINE_PREFIX_CACHE_HITS,
    ENGINE_ENCODER_IMAGES,
    ENGINE_ENCODER_TOKENS,
    ENGINE_ENCODER_TIME,
    ENGINE_ENCODER_CACHE_IMAGES,
    ENGINE_SPEC_TOKENS,
    ENGINE_TOKENS,
)
OPERATOR_METRICS = (
    OPERATOR_REPLICAS,
    OPERATOR_DECISIONS,
    OPERATOR_SIGNAL,
    OPERATOR_SIGNAL_TARGET,
    OPERATOR_COLD_START_DURATION,
    OPERATOR_RECONCILES,
)
PROCESS_METRICS = (REDIS_CLOCK_OFFSET,)  # of gateways and engines
ALL_METRICS = (*GATEWAY_METRICS, *ENGINE_METRICS, *OPERATOR_METRICS, *PROCESS_METRICS)

# Names on the engine's Prometheus endpoint that vLLM's users and inference routers look for.
# OpenTelemetry allows no colon in a name, so they exist on the Prometheus endpoint only.
VLLM_REQUESTS_RUNNING = "vllm:num_requests_running"
VLLM_REQUESTS_WAITING = "vllm:num_requests_waiting"
VLLM_KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"
VLLM_CACHE_CONFIG = "vllm:cache_config_info"
VLLM_PREEMPTIONS = "vllm:num_preemptions"
VLLM_PROMPT_TOKENS = "vllm:prompt_tokens"
VLLM_GENERATION_TOKENS = "vllm:generation_tokens"
VLLM_PREFIX_CACHE_QUERIES = "vllm:prefix_cache_queries"
VLLM_PREFIX_CACHE_HITS = "vllm:prefix_cache_hits"
VLLM_EXTERNAL_QUERIES = "vllm:external_prefix_cache_queries"
VLLM_EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
VLLM_MM_CACHE_QUERIES = "vllm:mm_cache_queries"
VLLM_MM_CACHE_HITS = "vllm:mm_cache_hits"
VLLM_SPEC_DRAFTS = "vllm:spec_decode_num_drafts"
VLLM_SPEC_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
VLLM_SPEC_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
VLLM_SPEC_ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
VLLM_LORA_REQUESTS = "vllm:lora_requests_info"
VLLM_SLEEP_STATE = "vllm:engine_sleep_state"
VLLM_LABELS = ("model_name", "engine")

# Attributes of metrics and spans.
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_ID = "gen_ai.request.id"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
TOKEN_TYPE = "gen_ai.token.type"  # noqa: S105 - a name, not a secret
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
ERROR_TYPE = "error.type"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
K8S_NAMESPACE = "k8s.namespace.name"
# vLLM's attributes, which are not in the conventions but widely read.
LATENCY_QUEUE = "gen_ai.latency.time_in_queue"
LATENCY_TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"  # noqa: S105
LATENCY_PREFILL = "gen_ai.latency.time_in_model_prefill"
LATENCY_DECODE = "gen_ai.latency.time_in_model_decode"
LATENCY_E2E = "gen_ai.latency.e2e"
# Our own attributes.
REASON = "reason"
STATE = "state"
PLACE = "place"
PHASE = "phase"
VARIANT = "variant"
KIND = "kind"
RESULT = "result"
TYPE = "type"
SIGNAL = "signal"
STREAM = "stream"
ENGINE_ID = "headrace.engine.id"
ATTEMPT = "headrace.attempt"
STEP_FIRST = "headrace.engine.step.first"
STEP_LAST = "headrace.engine.step.last"
STEP_NUMBER = "headrace.engine.step.number"
STEP_SEQUENCES = "headrace.engine.step.sequences"
STEP_TOKEN_COUNT = "headrace.engine.step.token_count"  # noqa: S105
PREEMPTION_COUNT = "headrace.engine.preemption_count"
TENANT = "headrace.tenant"
TENANT_LABEL = "tenant"
OTHER_TENANTS = "other"

PROVIDER = "headrace"
OPERATION_CHAT = "chat"
OPERATION_COMPLETION = "text_completion"

# Spans inside one request's trace, below the gateway's `{operation} {model}`.
SPAN_QUEUE = "headrace.queue"
SPAN_ENGINE = "headrace.engine"
SPAN_PREFILL = "headrace.engine.prefill"
SPAN_DECODE = "headrace.engine.decode"
SPAN_STEP = "headrace.engine.step"
