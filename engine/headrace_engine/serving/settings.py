"""Settings of the engine process: HEADRACE_ENGINE_* in the environment, or flags."""

from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from headrace_common.protocol.kv_roles import KVRole
from headrace_common.protocol.status import MAX_NAME_CHARS
from headrace_common.protocol.turns import TurnBounds
from headrace_common.protocol.variants import CANARY, STABLE
from headrace_common.sealing import settings as sealing
from headrace_common.structured import grammar_settings as grammar
from headrace_common.structured.grammar_checks import CheckBounds
from headrace_common.text.checkpoint import default_name, local_source
from headrace_common.wire.keys import MAX_SHARDS
from headrace_common.wire.messages import MAX_ID_CHARS

from ..core.config import DType, EngineConfig, KVCacheDType, Quantization
from ..core.speculative_config import SpeculativeConfig
from .role_config import RoleConfig
from .sharing_config import SharingConfig


class EngineSettings(BaseSettings):
    """The settings, read once at start. An invalid value is named and stops the start."""

    model_config = SettingsConfigDict(
        env_prefix="HEADRACE_ENGINE_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_prog_name="headrace engine",
        extra="forbid",
    )

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey to pull from")
    redis_credentials: Path | None = Field(
        None,
        description="folder with the files username and password of a Redis user, read for every "
        "connection; replaces those in redis_url",
    )
    sealing_keys_file: sealing.KeysFile = None
    sealing_mode: sealing.Mode = "require"
    model: str = Field(description="folder of a checkpoint, GGUF file, hub id, or headrace-demo")
    revision: str | None = Field(None, description="revision of the hub id, preferably a commit")
    served_model_name: str | None = Field(
        None, max_length=MAX_ID_CHARS, description="name that clients use; default: the model's"
    )
    chat_template: str | None = Field(
        None, description="file with a chat template that replaces the model's own"
    )
    register_model: bool = Field(
        True, description="register the model for gateways; false if another engine of it does"
    )
    owner: str = Field(
        "", description="namespace/name of the ModelService that owns the model's registration"
    )
    hold_waiting: bool = Field(
        False,
        description="once the model's registration is removed, waiting requests stay in the queue "
        "until their deadline, instead of failing with model_removed",
    )
    variant: Literal["stable", "canary"] = Field(
        "stable",
        description="side of the model's engines; the canary side gets the share of requests that "
        "its ModelService says; docs/operations.md",
    )
    queue_shards: int = Field(
        1,
        ge=1,
        le=MAX_SHARDS,
        description="shards of the model's queue, which may be on different nodes of a Redis "
        "cluster; preferably 1, 3, 6, 12 or 24; docs/operations.md",
    )

    dtype: DType = Field("auto", description="dtype of the weights; auto: the checkpoint's")
    quantization: Quantization = Field(
        "none",
        description="int8 and fp8 keep linear layers in 8-bit integers or floats (int8 on GPUs: "
        "native models only); gptq, awq and compressed-tensors accept only checkpoints of that "
        "format; docs/models.md",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="processes that share the model, each with its own GPU (or some of the cores) "
        "of its machine; docs/parallelism.md",
    )
    enable_expert_parallel: bool = Field(
        False,
        description="each of these processes has whole experts of a mixture, instead of a part of "
        "every expert; docs/parallelism.md",
    )
    nnodes: int = Field(
        1,
        ge=1,
        description="machines or pods that run these processes, as many on each; "
        "docs/parallelism.md",
    )
    node_rank: int = Field(
        0, ge=0, description="number of this node: 0 is the engine, the others only run processes"
    )
    master_addr: str = Field(
        "127.0.0.1", min_length=1, description="address of node 0, at which the others reach it"
    )
    master_port: int = Field(
        29501, ge=1, le=65535, description="port of node 0 on which the others join"
    )
    node_secret_file: str | None = Field(
        None,
        description="file with a secret that all nodes of the engine know; without it, any host "
        "that reaches master_port while node 0 waits can join",
    )
    node_timeout: float = Field(
        15.0, ge=1, description="seconds without a sign of life until a node counts as lost"
    )
    attention_backend: str = Field("auto", description="auto, reference, cpu, flash or triton")
    model_implementation: Literal["auto", "native", "transformers"] = Field(
        "auto", description="auto: native if the architecture has a native path"
    )
    task: Literal["auto", "generate", "embed"] = Field(
        "auto",
        description="generate text or make embeddings; auto: embed for embedding checkpoints",
    )
    pooler_config: dict[str, Any] = Field(
        default_factory=dict,
        description="how an embedding model pools, as JSON: pooling_type (LAST, MEAN, CLS), "
        "normalize, matryoshka_dimensions; default: the checkpoint's",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="longest prompt plus output in tokens; default: the checkpoint's"
    )
    block_size: int = Field(16, ge=1, le=1024, description="tokens in a KV block")
    kv_cache_dtype: KVCacheDType = Field(
        "auto",
        description="auto: the model's; fp8 (e4m3) and fp8_e5m2 hold twice as many tokens, less "
        "precisely; docs/memory.md",
    )
    kv_cache_memory: ByteSize | None = Field(
        None, description="size of the KV cache, such as 2GiB; default: measured"
    )
    num_blocks: int | None = Field(
        None, ge=1, description="size of the KV cache in blocks; default: measured"
    )
    memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="for a measured KV cache: the largest share of the GPU's total memory that may "
        "be in use, on CPUs of the available memory; docs/memory.md",
    )
    swap_space: float = Field(
        0.0,
        ge=0,
        description="GiB of host memory for the KV of preempted requests and of prefixes that the "
        "device has no room for; 0: none; docs/memory.md",
    )
    kv_offloading_folder: str | None = Field(
        None,
        description="folder in which engines share the KV of prefixes, also after a restart; needs "
        "swap_space; docs/memory.md",
    )
    kv_offloading_folder_size: float = Field(
        10.0, gt=0, description="the most GiB of that folder, for all engines together"
    )
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = Field(
        "kv_both",
        description="kv_producer computes prompts and hands their KV over through the folder, "
        "kv_consumer goes on with the answers; docs/memory.md",
    )
    max_local_prefill_length: int = Field(
        512,
        ge=0,
        description="tokens of the longest prompt that a kv_consumer computes itself while there "
        "is an engine of another role",
    )
    remote_prefill_timeout: float = Field(
        2.0,
        ge=0,
        description="seconds for which an engine leaves a request to engines of the other role; "
        "then it takes it",
    )
    max_num_seqs: int = Field(64, ge=1, description="the most sequences that run at once")
    max_num_batched_tokens: int = Field(2048, ge=1, description="the most tokens in a step")
    itl_target: float = Field(
        0.1,
        gt=0,
        description="the most seconds that a step should take while requests wait for their next "
        "token; prompts of other requests are cut into chunks that fit",
    )
    enable_prefix_caching: bool = Field(True, description="reuse the KV of common prompt prefixes")
    disable_hybrid_kv_cache_manager: bool = Field(
        False,
        description="use one block table for layers with and without a sliding window; all layers "
        "then keep all positions; docs/models.md",
    )
    watermark: float = Field(
        0.01, ge=0, lt=1, description="share of blocks that starting requests leave free"
    )
    speculative_config: dict[str, Any] | None = Field(
        None,
        description='speculative decoding, as JSON: {"method": "ngram"} or {"model": "<smaller '
        'checkpoint>"}; docs/speculative-decoding.md',
    )
    limit_mm_per_prompt: dict[str, int] = Field(
        default_factory=dict,
        description='the most images of a prompt, as JSON: {"image": 4}; 0 loads no vision tower; '
        "default: 999; docs/models.md",
    )
    encoder_cache_memory: ByteSize = Field(
        ByteSize(2**28), gt=0, description="memory for the embeddings of images, such as 1GiB"
    )
    max_num_encoder_input_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of images that a step encodes, if it encodes several; default: "
        "max_num_batched_tokens",
    )
    enable_lora: bool = Field(False, description="serve LoRA adapters; docs/lora.md")
    lora_modules: dict[str, str] = Field(
        default_factory=dict,
        description="adapters as name=folder or name=s3://bucket/folder, or as JSON; clients use "
        "each name as a model",
    )
    lora_dir: str | None = Field(
        None,
        description="folder from which adapters may be loaded while the engine serves; default: "
        "none are",
    )
    lora_hub: bool = Field(
        False,
        description="also load adapters by hub ids, as owner/name or owner/name@revision; needs "
        "lora_dir",
    )
    lora_object_storage: bool = Field(
        False,
        description="also load adapters from s3://bucket/folder, with the environment's AWS_ "
        "variables; needs lora_dir",
    )
    lora_experts: bool = Field(
        False,
        description="take memory for adapters that change the experts of a mixture, even if "
        "none of lora_modules does",
    )
    max_loras: int = Field(1, ge=1, description="the most adapters that run at once")
    max_lora_rank: int = Field(16, ge=1, description="the largest rank of an adapter")
    max_cpu_loras: int | None = Field(
        None, ge=1, description="the most adapters in host memory; default: max_loras"
    )
    policy: str = Field(
        "fcfs", description="fcfs, priority, sjf, fair, deadline, or module:Class of your own"
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
    low_priority_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of max_num_seqs up to which requests of low priority, such as those of "
        "batches, are taken; the rest stays free for others",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; default: torch's choice")

    deterministic: bool = Field(
        False,
        description="same bits for a request alone, in a batch, or resumed on another "
        "engine; docs/deterministic.md",
    )
    enforce_eager: bool = Field(False, description="run without CUDA graphs")
    enable_autotuner: bool = Field(
        True,
        description="measure kernels and launch parameters on the GPU at start, which takes some "
        "seconds; docs/performance.md",
    )
    tuned_config_folder: str | None = Field(
        None, description="folder that stores these measurements for engines that start later"
    )
    # A flag has no third value: `model_fields_set` tells whether it was given.
    async_scheduling: bool = Field(
        False,
        description="schedule the next step while the device runs one; default: on GPUs only",
    )

    enable_sleep_mode: bool = Field(
        False,
        description="let the engine sleep: POST /sleep?level=1 and /wake_up and GET /is_sleeping "
        "on the port of metrics; anyone who reaches the port can use them; docs/sharing.md",
    )

    sharing_group: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_ID_CHARS,
        description="name of an accelerator that engines of several models share: one of them is "
        "awake at a time; docs/sharing.md",
    )
    sharing_sleep_level: int = Field(
        1, ge=1, le=2, description="level of its sleep meanwhile: 2 also gives back its weights"
    )
    sharing_min_awake: float = Field(
        5.0, ge=0, description="seconds that the engine stays awake at least while it has work"
    )
    sharing_max_awake: float = Field(
        60.0, gt=0, description="seconds after which it lets another engine that has work wake up"
    )
    sharing_timeout: float = Field(
        10.0,
        ge=0,
        description="seconds to finish running requests before it sleeps; then they are given back",
    )

    display_name: str = Field(
        "", max_length=MAX_NAME_CHARS, description="what people call the engine, in consoles"
    )

    lease: float = Field(
        10.0, gt=0, description="seconds until other engines take the work of a silent one"
    )
    beat_interval: float = Field(3.0, gt=0, description="seconds between renewals of the lease")
    drain_timeout: float = Field(
        30.0, ge=0, description="seconds to finish running requests after SIGTERM"
    )
    after_drain: Literal["exit", "wait"] = Field(
        "exit",
        description="what to do after a drain through the queue: exit, or wait for SIGTERM or a "
        "recall; use wait if exited processes are restarted",
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
        description="listening socket passed by the parent process, instead of host and port",
    )
    debug_pages: bool = Field(
        False,
        description="serve steps, requests and profiles on the same port, for `headrace debug`; "
        "anyone who reaches the port can read them",
    )
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="JSON lines or text; auto: text on a terminal, else json"
    )

    @model_validator(mode="after")
    def _fit_together(self) -> "EngineSettings":
        for name in self.lora_modules:
            if not 0 < len(name) <= MAX_ID_CHARS or name == self.name:
                raise ValueError(
                    f"lora_modules: {name[:80]!r} must have 1 to {MAX_ID_CHARS} characters, and "
                    "not be the model's own name"
                )
        if self.lora_dir is not None and not self.enable_lora:
            raise ValueError("lora_dir is given, but enable_lora is off: switch it on")
        if self.kv_role != "kv_both" and self.kv_offloading_folder is None:
            raise ValueError(
                f"kv_role {self.kv_role} needs kv_offloading_folder, through which KV is handed "
                "over: name a folder, or use kv_both"
            )
        if self.sharing_group is not None and self.enable_sleep_mode:
            raise ValueError(
                "sharing_group decides when the engine sleeps: leave out enable_sleep_mode"
            )
        if self.sharing_min_awake > self.sharing_max_awake:
            raise ValueError("sharing_min_awake is above sharing_max_awake: lower it")
        for name in ("lora_hub", "lora_object_storage"):
            if getattr(self, name) and self.lora_dir is None:
                raise ValueError(f"{name} needs lora_dir: name a folder")
        return self

    @property
    def name(self) -> str:
        """The name that clients use for the served model."""
        return self.served_model_name or default_name(self.model)

    @property
    def side(self) -> str:
        """The side of requests that the engine runs."""
        return CANARY if self.variant == "canary" else STABLE

    @property
    def taken_ahead(self) -> int:
        """Requests to take beyond those that can start."""
        if self.lookahead is None:
            return 0 if self.policy == "fcfs" else self.max_num_seqs
        return self.lookahead

    @property
    def roles(self) -> RoleConfig:
        """The engine's part in disaggregated prefill."""
        return RoleConfig(
            role=KVRole(self.kv_role),
            max_local_prefill_length=self.max_local_prefill_length,
            timeout=self.remote_prefill_timeout,
        )

    @property
    def sharing(self) -> SharingConfig:
        """How the engine shares the accelerator of its `sharing_group`."""
        return SharingConfig(
            level=1 if self.sharing_sleep_level == 1 else 2,
            bounds=TurnBounds(self.sharing_min_awake, self.sharing_max_awake),
            timeout=self.sharing_timeout,
            lease=self.lease,
        )

    @property
    def grammar_bounds(self) -> CheckBounds:
        """Bounds of grammar checks. Waiting checks need none: they are of leased requests."""
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
            enable_expert_parallel=self.enable_expert_parallel,
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            master_addr=self.master_addr,
            master_port=self.master_port,
            node_secret_file=self.node_secret_file,
            node_timeout=self.node_timeout,
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
            kv_offloading_folder=self.kv_offloading_folder,
            kv_offloading_folder_size=self.kv_offloading_folder_size,
            kv_offloading_paced=self.kv_role != "kv_producer",
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            itl_target=self.itl_target,
            enable_prefix_caching=self.enable_prefix_caching,
            disable_hybrid_kv_cache_manager=self.disable_hybrid_kv_cache_manager,
            watermark=self.watermark,
            speculative_config=None
            if self.speculative_config is None
            else SpeculativeConfig.of(self.speculative_config),
            limit_mm_per_prompt=self.limit_mm_per_prompt,
            encoder_cache_bytes=self.encoder_cache_memory,
            max_num_encoder_input_tokens=self.max_num_encoder_input_tokens,
            enable_lora=self.enable_lora,
            lora_modules=self.lora_modules,
            lora_experts=self.lora_experts,
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
            enable_sleep_mode=self.enable_sleep_mode or self.sharing_group is not None,
            async_scheduling=self.async_scheduling
            if "async_scheduling" in self.model_fields_set
            else None,
        )
