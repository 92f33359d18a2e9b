"""Settings of the gateway process: HEADRACE_GATEWAY_* in the environment, or flags."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from headrace_common.protocol.base import QueueLimits
from headrace_common.protocol.ledger import LedgerBounds
from headrace_common.sealing import settings as sealing
from headrace_common.structured import grammar_settings as grammar
from headrace_common.text.checkpoint import default_name
from headrace_common.wire import keys
from headrace_common.wire.images import MAX_IMAGES
from headrace_common.wire.messages import MAX_ID_CHARS

ModelSource = str
# The same name as in the engine's settings.
ModelName = Annotated[str, Field(max_length=MAX_ID_CHARS)]


ToolCallParser = Literal[
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "gemma4",
    "glm45",
    "glm47",
    "granite",
    "granite4",
    "hermes",
    "hunyuan_a13b",
    "jamba",
    "kimi_k2",
    "lfm2",
    "llama3_json",
    "llama4_pythonic",
    "mimo",
    "minimax_m2",
    "mistral",
    "nemotron_json",
    "olmo3",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
    "seed_oss",
]
ReasoningParser = Literal[
    "auto",
    "none",
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v4",
    "gemma4",
    "glm45",
    "glm47",
    "kimi_k2",
    "mimo",
    "minimax_m2",
    "mistral",
    "nemotron_v3",
    "olmo3",
    "openai_gptoss",
    "qwen3",
    "seed_oss",
    "step3p5",
]


class GatewaySettings(BaseSettings):
    """Settings, read once at start; a value out of range stops the start and is named."""

    model_config = SettingsConfigDict(
        env_prefix="HEADRACE_GATEWAY_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_prog_name="headrace gateway",
        extra="forbid",
        frozen=True,
    )

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey of the queue")
    redis_credentials: Path | None = Field(
        None,
        description="folder with the files username and password of a Redis user, read for every "
        "connection; instead of those in redis_url",
    )
    startup_timeout: float = Field(
        60.0,
        ge=0,
        description="seconds that Redis may be away at the start before the gateway gives up",
    )
    redis_patience: float = Field(
        0.7,
        gt=0,
        le=60,
        description="seconds without an answer after which Redis counts as away: then requests get "
        "503 at once",
    )
    model: str | None = Field(
        None,
        description="folder of a checkpoint, GGUF file, hub id, or headrace-demo; beside the "
        "models that engines register",
    )
    served_model_name: ModelName | None = Field(
        None, description="name that clients use; default: the folder's, or the hub id's last part"
    )
    revision: str | None = Field(None, description="revision of the hub id, best a commit")
    chat_template: str | None = Field(
        None, description="file of a chat template to use for the model instead of its own"
    )
    lora_modules: tuple[ModelName, ...] = Field(
        (),
        description="names of LoRA adapters of the setting model; default: those that its engines "
        "register",
    )
    allow_runtime_lora_updating: bool = Field(
        False,
        description="serve /v1/load_lora_adapter and /v1/unload_lora_adapter; with API keys, only "
        "to keys with admin",
    )
    lora_load_timeout: float = Field(
        60.0, gt=0, description="seconds within which an engine must have loaded an adapter"
    )
    extra_models: dict[ModelName, ModelSource] = Field(
        default_factory=dict, description='further models, {"name": "folder or hub id"}'
    )
    model_aliases: dict[ModelName, ModelName] = Field(
        default_factory=dict,
        description='further names of served models, {"gpt-4o": "qwen"}; answers have the '
        "model's own name",
    )
    tool_call_parser: ToolCallParser = Field(
        "auto", description="form in which models write tool calls; auto: as their templates do"
    )
    reasoning_parser: ReasoningParser = Field(
        "auto", description="how models mark their reasoning; auto: as the chat template does"
    )
    max_model_len: int | None = Field(
        None, ge=1, description="longest prompt plus output; default: what the engines say"
    )

    api_keys_file: Path | None = Field(
        None,
        description="YAML or JSON file of API keys, read again when it changes; default: none, and "
        "no request needs a key",
    )

    sealing_keys_file: sealing.KeysFile = None
    sealing_mode: sealing.Mode = "require"

    allowed_origins: tuple[str, ...] = Field(
        (),
        description="origins whose web pages may ask from a browser (CORS), as "
        '["https://chat.example.com"], or ["*"]; default: none',
    )

    supervisor_fd: int | None = Field(
        None,
        ge=0,
        description="socket passed by the parent, which kills one of this machine's engines when a "
        "console asks for it; default: none, and no console can",
    )
    console: bool = Field(
        True, description="serve the console, a page that shows the system, at / and /console/"
    )

    strict_requests: bool = Field(
        True,
        description="refuse requests with unknown fields, or with tools that this server would "
        "have to run; otherwise these are left out. Fields that are known and not "
        "supported are refused in any case",
    )

    host: str = Field("127.0.0.1", description="address of the API")
    port: int = Field(8000, ge=0, le=65535, description="port of the API; 0 picks one")
    fd: int | None = Field(
        None, ge=0, description="listening socket passed by the parent, instead of host and port"
    )
    metrics_host: str = Field("127.0.0.1", description="address of /metrics")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port of /metrics; 0 picks one; default: none"
    )
    metrics_fd: int | None = Field(
        None,
        ge=0,
        description="listening socket of /metrics passed by the parent, instead of host and port",
    )

    max_queued_requests: int = Field(1024, ge=1, description="waiting requests of one model")
    max_queued_tokens: int = Field(
        4_000_000, ge=1, description="prompt plus output tokens of one model's waiting requests"
    )
    max_queued_requests_per_tenant: int = Field(
        0,
        ge=0,
        description="waiting requests of one tenant for one model; 0: as many as of all tenants",
    )
    placement: Literal["prefix", "none"] = Field(
        "prefix",
        description="prefix: a request goes to the engine that has most of its prompt in its "
        "cache, while its load allows; none: to any engine",
    )
    placement_prefix_tokens: int = Field(
        128,
        ge=1,
        description="tokens of the shortest cached beginning of a prompt that decides its "
        "placement; without one, prompts with the same first tokens go to the same engine",
    )
    placement_load_factor: float = Field(
        1.25,
        ge=1,
        description="an engine gets no more placed requests once it has more than this multiple of "
        "its share",
    )
    placement_steal_after: float = Field(
        0.1,
        ge=0,
        description="seconds that a request waits for its placed engine, after which any engine "
        "takes it",
    )
    usage_ledger_entries: int = Field(
        keys.LEDGER_KEPT,
        ge=0,
        description="entries that a shard's ledger of usage keeps; 0: no usage is entered",
    )
    usage_ledger_retention: float = Field(
        keys.LEDGER_TTL_MS / 1000, gt=0, description="seconds for which it keeps them"
    )
    default_deadline: float = Field(
        600.0, gt=0, description="seconds until a request must have ended, if it names no deadline"
    )
    max_deadline: float = Field(
        3600.0, gt=0, description="the longest deadline that a request may name, in seconds"
    )
    result_ttl: float = Field(
        86_400.0,
        gt=0,
        description="seconds for which the outcome of a request with an Idempotency-Key, "
        "x-resumable or background can be read",
    )
    resume_window: float = Field(
        60.0,
        gt=0,
        description="seconds that such a request, unless it is in the background, runs on without "
        "a client",
    )
    max_prompts: int = Field(64, ge=1, description="prompts in one completions request")
    max_embedding_inputs: int = Field(
        2048, ge=1, description="inputs of one request for embeddings, pairs of one for scores"
    )
    max_kept_embedding_bytes: ByteSize = Field(
        ByteSize(32 * 2**20),
        ge=1024,
        description="part of max_tenant_store_bytes for embeddings of requests with an "
        "Idempotency-Key; the same again for the lines of running batches",
    )
    max_tenant_store_bytes: ByteSize = Field(
        ByteSize(64 * 2**20),
        ge=1024,
        description="bytes that one tenant may store in Redis: requests and their answers, files, "
        "batches and their results. More is refused (429)",
    )
    max_stored_requests: int = Field(
        10_000,
        ge=1,
        description="requests of one tenant that are stored: with an Idempotency-Key, x-resumable, "
        "background or store",
    )
    store_memory_share: float = Field(
        0.6,
        gt=0,
        le=1,
        description="part of Redis' maxmemory beyond which nothing more is stored for any tenant "
        "(503); the rest is for requests that are answered at once",
    )
    max_choices: int = Field(128, ge=1, description="choices of one request: n times its prompts")
    max_file_bytes: ByteSize = Field(
        ByteSize(32 * 2**20), ge=1024, description="largest file for batches, such as 64MiB"
    )
    max_stored_bytes: ByteSize = Field(
        ByteSize(64 * 2**20), ge=1024, description="part of max_tenant_store_bytes for files"
    )
    max_stored_files: int = Field(1000, ge=1, description="files of one tenant")
    file_ttl: float = Field(
        604_800.0,
        ge=3600,
        description="seconds for which a file is kept, unless the client asks for less",
    )
    max_batch_requests: int = Field(50_000, ge=1, description="requests in one batch")
    max_batch_output_bytes: ByteSize = Field(
        ByteSize(32 * 2**20),
        ge=1024,
        description="bytes of one batch's results, beyond which its further requests fail",
    )
    max_open_batches: int = Field(
        100, ge=1, description="batches of one tenant that have not ended"
    )
    max_running_batches: int = Field(8, ge=1, description="batches that this gateway runs at once")
    batch_concurrency: int = Field(
        32, ge=1, le=1024, description="requests of one batch that are in the queue at once"
    )
    max_images: int = Field(64, ge=0, le=MAX_IMAGES, description="images in one request")
    max_image_bytes: ByteSize = Field(
        ByteSize(8 * 2**20), ge=1024, description="largest image as the client sends it"
    )
    max_image_pixels: int = Field(
        16_777_216,
        ge=1,
        le=100_000_000,
        description="most pixels of one image: width times height",
    )
    allowed_media_domains: tuple[str, ...] = Field(
        (),
        description="hosts from which images may be fetched, as "
        '["images.example.com"]; default: none, and images must be data: URLs',
    )
    max_held_image_bytes: ByteSize = Field(
        ByteSize(128 * 2**20),
        ge=1024,
        description="bytes of images in this gateway's memory: of requests that have not ended, "
        "and of the last ones; one tenant has at most half",
    )
    max_tenant_images: int = Field(
        1024, ge=1, description="images of one tenant's requests that one model's queue stores"
    )
    max_tenant_image_bytes: ByteSize = Field(
        ByteSize(64 * 2**20), ge=1024, description="bytes of these images"
    )
    image_workers: int = Field(1, ge=1, le=64, description="processes that decode clients' images")
    max_body_bytes: ByteSize = Field(
        ByteSize(8 * 2**20), ge=1024, description="largest request body, such as 8MiB"
    )
    max_connections: int = Field(
        10_000,
        ge=1,
        description="open connections, fewer if the process may not open as many files. If all are "
        "in use, a new one closes the one that has waited longest for a request; if none waits for "
        "a request, the new one gets 503",
    )

    max_open_requests_per_tenant: int = Field(
        10_000,
        ge=1,
        description="requests of one tenant that this gateway has begun and not yet answered, at "
        "most three quarters of the connections; more get 429. Without API keys there is no limit",
    )

    lease: float = Field(
        10.0,
        ge=1,
        description="seconds without a heartbeat after which other gateways continue this one's "
        "requests",
    )
    keep_alive_interval: float = Field(
        15.0, gt=0, description="seconds of silence in a stream before a comment is sent"
    )
    header_timeout: float = Field(10.0, gt=0, description="seconds a client has for its headers")
    body_timeout: float = Field(60.0, gt=0, description="seconds a client has for its body")
    write_timeout: float = Field(
        30.0, gt=0, description="seconds after which a client that does not read is dropped"
    )
    drain_timeout: float = Field(
        30.0, ge=0, description="seconds that running streams have after SIGTERM"
    )
    max_step_age: float = Field(
        60.0, gt=0, description="seconds without a step after which an engine counts as hung"
    )
    grammar_workers: grammar.Workers = grammar.WORKERS
    grammar_timeout: grammar.Timeout = grammar.TIMEOUT
    grammar_cpu_seconds: grammar.CpuSeconds = grammar.CPU_SECONDS
    grammar_memory: grammar.Memory = grammar.MEMORY
    tokenizer_threads: int = Field(
        2,
        ge=1,
        le=64,
        description="threads for large requests that one tenant may keep busy; there is one more, "
        "so that no tenant has all",
    )

    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="json lines, or text to read; auto: text on a terminal"
    )

    @model_validator(mode="after")
    def _of_the_model(self) -> "GatewaySettings":
        for name in ("served_model_name", "revision", "chat_template"):
            if getattr(self, name) is not None and self.model is None:
                raise ValueError(f"{name} is of the setting model, which is not given")
        if self.lora_modules and self.model is None:
            raise ValueError("lora_modules are of the setting model, which is not given")
        own = {self.name, *self.lora_modules, *self.extra_models}
        if taken := sorted(self.model_aliases.keys() & own):
            raise ValueError(f"model_aliases: {taken[0]} is a model's own name; take another alias")
        return self

    @property
    def name(self) -> str | None:
        """The model's name for clients, derived as in the engine's settings."""
        return None if self.model is None else self.served_model_name or default_name(self.model)

    @property
    def ledger(self) -> LedgerBounds:
        return LedgerBounds(
            entries=self.usage_ledger_entries, kept_ms=round(self.usage_ledger_retention * 1000)
        )

    @property
    def queue_limits(self) -> QueueLimits:
        return QueueLimits(
            max_requests=self.max_queued_requests,
            max_tokens=self.max_queued_tokens,
            max_tenant_requests=self.max_queued_requests_per_tenant,
            max_tenant_images=self.max_tenant_images,
            max_tenant_image_bytes=int(self.max_tenant_image_bytes),
        )
