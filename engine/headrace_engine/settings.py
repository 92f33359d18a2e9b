"""Settings of the engine process: HEADRACE_ENGINE_* in the environment, or flags so named."""

from typing import Any, Literal

from pydantic import ByteSize, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from headrace_common import grammar_settings as grammar
from headrace_common.checkpoint import default_name, local_source
from headrace_common.grammar_checks import CheckBounds
from headrace_common.keys import MAX_SHARDS
from headrace_common.messages import MAX_ID_CHARS

from .config import DType, EngineConfig, KVCacheDType, Quantization
from .speculation.config import SpeculativeConfig


class EngineSettings(BaseSettings):
    """Read once at start; a value that is out of range stops the start and is named."""

    model_config = SettingsConfigDict(
        env_prefix="HEADRACE_ENGINE_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_prog_name="headrace engine",
        extra="forbid",
    )

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey to pull from")
    model: str = Field(description="folder of a checkpoint, its hub id, or headrace-demo")
    revision: str | None = Field(None, description="revision of the hub id, best a commit")
    served_model_name: str | None = Field(
        None, max_length=MAX_ID_CHARS, description="name that clients use; default: the model's"
    )
    chat_template: str | None = Field(
        None, description="file of a chat template to use instead of the model's own"
    )
    register_model: bool = Field(
        True, description="tell gateways of the model; false where another engine of it does"
    )
    owner: str = Field(
        "", description="namespace/name of the ModelService that the model's registration is of"
    )
    queue_shards: int = Field(
        1,
        ge=1,
        le=MAX_SHARDS,
        description="shards of the model's queue, which may be on different nodes of a Redis "
        "cluster; best 1, 3, 6, 12 or 24; docs/operations.md",
    )

    dtype: DType = Field("auto", description="auto takes the checkpoint's")
    quantization: Quantization = Field(
        "none",
        description="int8 keeps linear layers in 8 bits, on GPUs for native models; fp8 in 8-bit "
        "floats; gptq, awq or compressed-tensors refuse checkpoints that are not; docs/models.md",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="processes that share the model, each with a GPU (or some cores) of this "
        "machine; docs/parallelism.md",
    )
    attention_backend: str = Field("auto", description="auto, reference, cpu, flash or triton")
    model_implementation: Literal["auto", "native", "transformers"] = Field(
        "auto", description="auto is native where the architecture has a native path"
    )
    task: Literal["auto", "generate", "embed"] = Field(
        "auto",
        description="generate text, or make embeddings; auto is embed for checkpoints saved so",
    )
    pooler_config: dict[str, Any] = Field(
        default_factory=dict,
        description="how an embedding model pools, as JSON: pooling_type (LAST, MEAN, CLS), "
        "normalize, matryoshka_dimensions; default: what the checkpoint says",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="longest prompt plus output in tokens; default: the checkpoint's"
    )
    block_size: int = Field(16, ge=1, le=1024, description="tokens a KV block")
    kv_cache_dtype: KVCacheDType = Field(
        "auto",
        description="auto is the model's; fp8 (e4m3) or fp8_e5m2 keep twice as many tokens, less "
        "exactly; docs/memory.md",
    )
    kv_cache_memory: ByteSize | None = Field(
        None, description="bytes of KV cache, as 2GiB; default: measured"
    )
    num_blocks: int | None = Field(
        None, ge=1, description="KV blocks, instead of bytes; default: measured"
    )
    memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the free memory that the KV cache may take"
    )
    swap_space: float = Field(
        0.0,
        ge=0,
        description="GiB of host memory that KV may be swapped to when blocks run out; 0: none",
    )
    max_num_seqs: int = Field(64, ge=1, description="sequences that run at once")
    max_num_batched_tokens: int = Field(2048, ge=1, description="tokens a step")
    itl_target: float = Field(
        0.1,
        gt=0,
        description="seconds that a step should take at most while requests wait for their next "
        "token; prompts of others are cut into pieces that fit",
    )
    enable_prefix_caching: bool = Field(True, description="reuse the KV of equal prompt beginnings")
    disable_hybrid_kv_cache_manager: bool = Field(
        False,
        description="one block table for layers with and without a sliding window, which then all "
        "keep everything; docs/models.md",
    )
    watermark: float = Field(0.01, ge=0, lt=1, description="share of blocks kept free at admission")
    speculative_config: dict[str, Any] | None = Field(
        None,
        description='speculative decoding, as JSON: {"method": "ngram"} or {"model": "<smaller '
        'checkpoint>"}; docs/speculative-decoding.md',
    )
    enable_lora: bool = Field(False, description="serve LoRA adapters; docs/lora.md")
    lora_modules: dict[str, str] = Field(
        default_factory=dict,
        description="adapters as name=folder, or as JSON; each is a model of its own to clients",
    )
    max_loras: int = Field(1, ge=1, description="different adapters that run at once")
    max_lora_rank: int = Field(16, ge=1, description="largest rank of an adapter")
    max_cpu_loras: int | None = Field(
        None, ge=1, description="adapters kept in host memory; default: max_loras"
    )
    policy: str = Field(
        "fcfs", description="fcfs, priority, sjf, fair, deadline, or module:Class of one's own"
    )
    policy_options: dict[str, Any] = Field(
        default_factory=dict, description="the policy's options, as JSON; docs/policies.md"
    )
    lookahead: int | None = Field(
        None,
        ge=0,
        description="requests taken beyond those that can start, for the policy to choose from; "
        "default: 0 with fcfs, else max_num_seqs",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; default: torch's choice")

    deterministic: bool = Field(
        False,
        description="the same bits for a request alone, in a crowd, or resumed on another engine; "
        "docs/deterministic.md",
    )
    enforce_eager: bool = Field(False, description="no CUDA graphs: each kernel is launched anew")
    enable_autotuner: bool = Field(
        True,
        description="measure kernels and launch parameters on the GPU at start, for some seconds; "
        "docs/performance.md",
    )
    tuned_config_folder: str | None = Field(
        None, description="folder that keeps what was measured, for engines that start later"
    )
    # A flag has no third value: whether it was given at all tells it from the default.
    async_scheduling: bool = Field(
        False, description="plan the next step while the device runs one; default: on GPUs only"
    )

    lease: float = Field(10.0, gt=0, description="seconds until a silent engine's work is taken")
    beat_interval: float = Field(3.0, gt=0, description="seconds between renewals of the lease")
    drain_timeout: float = Field(
        30.0, ge=0, description="seconds to finish running work after SIGTERM"
    )
    step_timeout: float = Field(
        120.0, gt=0, description="seconds after which a step counts as hung"
    )

    grammar_workers: grammar.Workers = grammar.WORKERS
    grammar_timeout: grammar.Timeout = grammar.TIMEOUT
    grammar_cpu_seconds: grammar.CpuSeconds = grammar.CPU_SECONDS
    grammar_memory: grammar.Memory = grammar.MEMORY

    metrics_host: str = Field("127.0.0.1", description="address of /metrics and /health")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port of /metrics and /health; 0 picks one; default: none"
    )
    metrics_fd: int | None = Field(
        None,
        ge=0,
        description="listening socket for them passed by the parent, instead of host and port",
    )
    debug_pages: bool = Field(
        False,
        description="show steps, requests and profiles on that port too, for `headrace debug`, to "
        "all who reach it",
    )
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="json lines, or text to read; auto: text on a terminal"
    )

    @model_validator(mode="after")
    def _adapters_have_names(self) -> "EngineSettings":
        for name in self.lora_modules:
            if not 0 < len(name) <= MAX_ID_CHARS or name == self.name:
                raise ValueError(
                    f"lora_modules: {name[:80]!r} must have 1 to {MAX_ID_CHARS} characters, and "
                    "not be the model's own name"
                )
        return self

    @property
    def name(self) -> str:
        """The served model's name for clients."""
        return self.served_model_name or default_name(self.model)

    @property
    def taken_ahead(self) -> int:
        """Requests to take beyond those that can start."""
        if self.lookahead is None:
            return 0 if self.policy == "fcfs" else self.max_num_seqs
        return self.lookahead

    @property
    def grammar_bounds(self) -> CheckBounds:
        """No more grammars wait than requests that the engine has taken."""
        return CheckBounds(
            workers=self.grammar_workers,
            limits=grammar.task_limits(self),
            max_wait=None,
            most_waiting=None,
            most_waiting_of_tenant=None,
        )

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            model=local_source(self.model),
            revision=self.revision,
            dtype=self.dtype,
            quantization=self.quantization,
            device=self.device,
            tensor_parallel_size=self.tensor_parallel_size,
            attention_backend=self.attention_backend,
            model_implementation=self.model_implementation,
            task=self.task,
            pooler_config=self.pooler_config,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            kv_cache_dtype=self.kv_cache_dtype,
            kv_cache_bytes=self.kv_cache_memory,
            num_blocks=self.num_blocks,
            memory_utilization=self.memory_utilization,
            swap_space=self.swap_space,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            itl_target=self.itl_target,
            enable_prefix_caching=self.enable_prefix_caching,
            disable_hybrid_kv_cache_manager=self.disable_hybrid_kv_cache_manager,
            watermark=self.watermark,
            speculative_config=None
            if self.speculative_config is None
            else SpeculativeConfig.of(self.speculative_config),
            enable_lora=self.enable_lora,
            lora_modules=self.lora_modules,
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank,
            max_cpu_loras=self.max_cpu_loras,
            policy=self.policy,
            policy_options=self.policy_options,
            threads=self.threads,
            deterministic=self.deterministic,
            enforce_eager=self.enforce_eager,
            enable_autotuner=self.enable_autotuner,
            tuned_config_folder=self.tuned_config_folder,
            async_scheduling=self.async_scheduling
            if "async_scheduling" in self.model_fields_set
            else None,
        )
