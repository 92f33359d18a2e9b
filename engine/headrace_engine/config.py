"""Frozen configuration of one engine. Values that are computed live in properties or elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Literal

from .errors import ConfigError
from .speculation.config import SpeculativeConfig

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "gptq", "awq", "compressed-tensors", "fp8"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
LoadFormat = Literal["auto", "dummy"]

_NO_OPTIONS: Mapping[str, object] = MappingProxyType({})
_NO_MODULES: Mapping[str, str] = MappingProxyType({})
_COUNTS = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens"),
    *("tensor_parallel_size", "max_loras", "max_lora_rank"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine runs and how much it may take on at once.

    `tensor_parallel_size` processes share the model, each with a GPU of its own (or some of the
    cores); `kv_cache_bytes`, `swap_space` and `threads` are of each of them.
    `model` is a folder or a hub id. `kv_cache_bytes` None measures: what is free after the weights
    and a profile run of the largest step, times `memory_utilization`. `max_model_len` None takes
    the checkpoint's. `kv_cache_dtype` fp8 (e4m3) or fp8_e5m2 keeps keys and values in 8 bits, with
    the scales that the checkpoint has for them, or none. `watermark` is the share of blocks that
    admission leaves free, so that running sequences can grow before one must be preempted.
    `swap_space` is host memory in GiB for the KV of preempted sequences, where copying it costs
    less than computing it again. Layers that keep different positions, all or a window, have block
    tables of their own, unless `disable_hybrid_kv_cache_manager` says no. `itl_target`: the
    seconds that a step should take at most while sequences decode, whatever prompts wait.
    `model_implementation`: `auto` is native where the architecture has a native path, else
    transformers. `quantization` int8 keeps the weights of linear layers in 8 bits, a scale for each
    output; models on CPUs and native ones on GPUs have it. A quantised checkpoint is found by its
    config.json; its name here refuses all others. `task` auto is
    embed for checkpoints that were saved to embed, else generate; `pooler_config` (pooling_type,
    normalize, matryoshka_dimensions) replaces what such a checkpoint says. `lora_modules` are
    folders of LoRA adapters by name: up to `max_loras` of them run at once, of ranks up to
    `max_lora_rank`; `max_cpu_loras` (None: as many as run) stay in host memory. `deterministic`
    makes a request's tokens and log probabilities the same bits whatever else runs, or refuses a
    model for which there is no such way. `enforce_eager` does without CUDA graphs. With
    `enable_autotuner` kernels and launch parameters are measured on a GPU before it serves, where
    steps are recorded and not `deterministic`; `tuned_config_folder` keeps what was measured.
    `load_format` dummy draws weights at random, where only speeds are asked for.
    `async_scheduling` plans the next step while the device runs one; None: on GPUs.
    """

    model: str
    revision: str | None = None
    load_format: LoadFormat = "auto"
    dtype: DType = "auto"
    device: str = "auto"
    tensor_parallel_size: int = 1
    attention_backend: str = "auto"
    model_implementation: Literal["auto", "native", "transformers"] = "auto"
    task: Literal["auto", "generate", "embed"] = "auto"
    pooler_config: Mapping[str, object] = field(default_factory=lambda: _NO_OPTIONS)
    quantization: Quantization = "none"
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_dtype: KVCacheDType = "auto"
    kv_cache_bytes: int | None = None
    num_blocks: int | None = None
    memory_utilization: float = 0.9
    swap_space: float = 0.0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    itl_target: float = inf
    enable_prefix_caching: bool = True
    disable_hybrid_kv_cache_manager: bool = False
    watermark: float = 0.01
    speculative_config: SpeculativeConfig | None = None
    enable_lora: bool = False
    lora_modules: Mapping[str, str] = field(default_factory=lambda: _NO_MODULES)
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    policy: str = "fcfs"
    policy_options: Mapping[str, object] = field(default_factory=lambda: _NO_OPTIONS)
    seed: int = 0
    threads: int | None = None
    deterministic: bool = False
    enforce_eager: bool = False
    enable_autotuner: bool = True
    tuned_config_folder: str | None = None
    async_scheduling: bool | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.itl_target > 0.0:
            raise ConfigError(f"itl_target must be above 0 seconds, not {self.itl_target}")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark must be in [0, 1), not {self.watermark}")
        if not 0.0 <= self.swap_space < inf:
            raise ConfigError(f"swap_space must be GiB, 0 or more, not {self.swap_space}")
        self._check_lora()
        self._check_parallel()
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(
                f"memory_utilization must be in (0, 1], not {self.memory_utilization}"
            )

    @property
    def has_draft_model(self) -> bool:
        return self.speculative_config is not None and self.speculative_config.model is not None

    def _check_parallel(self) -> None:
        if self.deterministic and self.tensor_parallel_size > 1:
            raise ConfigError(
                "deterministic is for one process, and tensor_parallel_size is "
                f"{self.tensor_parallel_size}: use 1, or switch deterministic off"
            )

    def _check_lora(self) -> None:
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras must be at least max_loras ({self.max_loras}), not "
                f"{self.max_cpu_loras}"
            )
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("lora_modules are given, but enable_lora is off: switch it on")
