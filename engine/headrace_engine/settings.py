"""Settings of the engine process: HEADRACE_ENGINE_* in the environment, or flags so named."""

from typing import Any, Literal

from pydantic import ByteSize, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from headrace_common.checkpoint import default_name, local_source

from .config import DType, EngineConfig


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
        None, description="name that clients use; default: the model's"
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
    shard: int = Field(0, ge=0, description="queue shard of the model that this engine serves")

    dtype: DType = Field("auto", description="auto takes the checkpoint's")
    quantization: Literal["none", "int8"] = Field(
        "none", description="int8 keeps linear layers in 8 bits; native models on CPUs"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    attention_backend: str = Field("auto", description="auto, reference, cpu or flash")
    model_implementation: Literal["auto", "native", "transformers"] = Field(
        "auto", description="auto is native where the architecture has a native path"
    )
    max_model_len: int | None = Field(
        None, ge=1, description="longest prompt plus output in tokens; default: the checkpoint's"
    )
    block_size: int = Field(16, ge=1, le=1024, description="tokens a KV block")
    kv_cache_memory: ByteSize | None = Field(
        None, description="bytes of KV cache, as 2GiB; default: measured"
    )
    num_blocks: int | None = Field(
        None, ge=1, description="KV blocks, instead of bytes; default: measured"
    )
    memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the free memory that the KV cache may take"
    )
    max_num_seqs: int = Field(64, ge=1, description="sequences that run at once")
    max_num_batched_tokens: int = Field(2048, ge=1, description="tokens a step")
    enable_prefix_caching: bool = Field(True, description="reuse the KV of equal prompt beginnings")
    watermark: float = Field(0.01, ge=0, lt=1, description="share of blocks kept free at admission")
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

    lease: float = Field(10.0, gt=0, description="seconds until a silent engine's work is taken")
    beat_interval: float = Field(3.0, gt=0, description="seconds between renewals of the lease")
    drain_timeout: float = Field(
        30.0, ge=0, description="seconds to finish running work after SIGTERM"
    )
    step_timeout: float = Field(
        120.0, gt=0, description="seconds after which a step counts as hung"
    )

    metrics_host: str = Field("127.0.0.1", description="address of /metrics and /health")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port of /metrics and /health; 0 picks one; default: none"
    )
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: Literal["json", "text"] = Field("json", description="json lines, or text to read")

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

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            model=local_source(self.model),
            revision=self.revision,
            dtype=self.dtype,
            quantization=self.quantization,
            device=self.device,
            attention_backend=self.attention_backend,
            model_implementation=self.model_implementation,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            kv_cache_bytes=self.kv_cache_memory,
            num_blocks=self.num_blocks,
            memory_utilization=self.memory_utilization,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            watermark=self.watermark,
            policy=self.policy,
            policy_options=self.policy_options,
            threads=self.threads,
        )
