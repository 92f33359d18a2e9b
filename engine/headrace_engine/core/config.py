"""The configuration of one engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Literal

from .errors import ConfigError
from .speculative_config import SpeculativeConfig

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "gptq", "awq", "compressed-tensors", "fp8"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
LoadFormat = Literal["auto", "dummy"]
SleepLevel = Literal[1, 2]

_NO_OPTIONS: Mapping[str, object] = MappingProxyType({})
_NO_MODULES: Mapping[str, str] = MappingProxyType({})
_NO_LIMITS: Mapping[str, int] = MappingProxyType({})
# The kinds of media that vLLM's limit_mm_per_prompt names.
_MEDIA = ("image", "video", "audio")
_COUNTS = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens"),
    *("tensor_parallel_size", "nnodes", "max_loras", "max_lora_rank", "encoder_cache_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The configuration of an engine: its model and its resources.

    Model: `model` is a folder or a hub id. `load_format` dummy makes random weights, for
    measurements of speed. `max_model_len` None takes the checkpoint's. `model_implementation` auto
    is native if the architecture has a native path, else transformers. `quantization` int8 keeps
    the weights of linear layers in 8 bits with a scale for each output; it needs a CPU or a native
    model on a GPU. Quantised checkpoints are recognised by their config.json; naming their format
    here refuses all other checkpoints. `task` auto is embed for checkpoints that were saved as
    embedding models, else generate; `pooler_config` (pooling_type, normalize,
    matryoshka_dimensions) replaces the checkpoint's own.

    Processes: `tensor_parallel_size` processes share the model, each with its own GPU (or a part of
    the cores). With `enable_expert_parallel` each of them has whole experts of a mixture, otherwise
    a part of every expert. `kv_cache_bytes`, `swap_space` and `threads` are for each process.

    Nodes: the processes run on `nnodes` machines or pods, as many on each. This is node
    `node_rank`; node 0 is the engine, and the others reach it at `master_addr` and `master_port`.
    If `node_secret_file` is given, only nodes with the same content may join. A node is lost after
    `node_timeout` seconds without a sign of life.

    KV cache: without `kv_cache_bytes` and `num_blocks` its size is measured: on GPUs
    `memory_utilization` of the total memory, on CPUs of the available memory, minus what the
    weights and the largest step use. `kv_cache_dtype` fp8 (e4m3) or fp8_e5m2 stores keys and values
    in 8 bits, with the checkpoint's scales if it has any. `watermark` is the share of blocks that
    starting sequences leave free, so that running ones can grow without a preemption. `swap_space`
    is host memory in GiB for the KV of preempted sequences and of prefixes that the device has no
    room for; it is used if copying is cheaper than recomputing. `kv_offloading_folder` is a folder
    of `kv_offloading_folder_size` GiB that engines share: the KV of prefixes is also written there,
    and found again by other engines and after a restart; it needs `swap_space`. On CPUs it is
    written slowly while requests run, if `kv_offloading_paced`. Layers with and without a sliding
    window have separate block tables, unless `disable_hybrid_kv_cache_manager`.

    Steps: while sequences decode, prompts are cut to steps of at most `itl_target` seconds.
    `async_scheduling` schedules the next step while the device runs one; None: on GPUs only.
    `enforce_eager` switches CUDA graphs off. `enable_autotuner` measures kernels and launch
    parameters on a GPU before it serves, if CUDA graphs are on and `deterministic` is off;
    `tuned_config_folder` stores the measurements. `deterministic` makes a request's tokens and log
    probabilities bitwise independent of other requests, and refuses models that cannot do so.

    Images: `limit_mm_per_prompt` {"image": n} is the most images of a prompt (default: 999); with 0
    the vision tower is not loaded. Encoded images are kept in `encoder_cache_bytes`. A step encodes
    images of at most `max_num_encoder_input_tokens` (None: max_num_batched_tokens) tokens, or one.

    LoRA: `lora_modules` are folders, or s3:// addresses, of adapters by name. At most `max_loras`
    run at once, of ranks up to `max_lora_rank`; `max_cpu_loras` (None: `max_loras`) stay in host
    memory. With `lora_experts` there is memory for adapters that change experts.

    Sleep: with `enable_sleep_mode` the engine may give its memory back while it is not needed.
    """

    model: str
    revision: str | None = None
    load_format: LoadFormat = "auto"
    dtype: DType = "auto"
    device: str = "auto"
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    node_secret_file: str | None = None
    node_timeout: float = 15.0
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
    kv_offloading_folder: str | None = None
    kv_offloading_folder_size: float = 10.0
    kv_offloading_paced: bool = True
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    itl_target: float = inf
    enable_prefix_caching: bool = True
    disable_hybrid_kv_cache_manager: bool = False
    watermark: float = 0.01
    speculative_config: SpeculativeConfig | None = None
    limit_mm_per_prompt: Mapping[str, int] = field(default_factory=lambda: _NO_LIMITS)
    encoder_cache_bytes: int = 2**28
    max_num_encoder_input_tokens: int | None = None
    enable_lora: bool = False
    lora_modules: Mapping[str, str] = field(default_factory=lambda: _NO_MODULES)
    lora_experts: bool = False
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
    enable_sleep_mode: bool = False

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
        self._check_offloading()
        self._check_lora()
        self._check_parallel()
        self._check_draft_head()
        self._check_sleep()
        self._check_media()
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(
                f"memory_utilization must be in (0, 1], not {self.memory_utilization}"
            )

    @property
    def ranks_per_node(self) -> int:
        """The number of processes on each node."""
        return self.tensor_parallel_size // self.nnodes

    @property
    def has_draft_model(self) -> bool:
        config = self.speculative_config
        return config is not None and config.method == "draft_model"

    @property
    def draft_head(self) -> SpeculativeConfig | None:
        """The speculative configuration, if it names a head that reads hidden states."""
        config = self.speculative_config
        return config if config is not None and config.has_head else None

    def _check_draft_head(self) -> None:
        """Raises ConfigError for what draft heads do not support."""
        head = self.draft_head
        refused = {
            f"tensor_parallel_size {self.tensor_parallel_size}": self.tensor_parallel_size > 1
            and head is not None
            and head.method != "mtp",
            "enable_lora": self.enable_lora,
            "load_format dummy": self.load_format == "dummy",
            "model_implementation transformers": self.model_implementation == "transformers",
            "task embed": self.task == "embed",
        }
        for name, wanted in refused.items():
            if head is not None and wanted:
                raise ConfigError(
                    f"speculative_config.method {head.method} does not support {name}: leave one "
                    "of them out, or use method ngram or draft_model"
                )

    def _check_sleep(self) -> None:
        """Raises ConfigError for what cannot give its memory back."""
        refused = {
            f"tensor_parallel_size {self.tensor_parallel_size}": self.tensor_parallel_size > 1,
            "a draft model": self.has_draft_model,
            "a draft head": self.draft_head is not None,
        }
        for name, wanted in refused.items():
            if self.enable_sleep_mode and wanted:
                raise ConfigError(
                    f"enable_sleep_mode does not support {name}: leave one of them out"
                )

    def _check_media(self) -> None:
        for kind, most in self.limit_mm_per_prompt.items():
            if kind not in _MEDIA or type(most) is not int or most < 0:
                raise ConfigError(
                    "limit_mm_per_prompt must be a number of images, such as "
                    f'{{"image": 4}}, not {dict(self.limit_mm_per_prompt)!r:.80}'
                )
            if kind != "image" and most:
                raise ConfigError(f"limit_mm_per_prompt: {kind} is not supported: set it to 0")

    def _check_offloading(self) -> None:
        if self.kv_offloading_folder is None:
            return
        if not 0.0 < self.kv_offloading_folder_size < inf:
            raise ConfigError(
                "kv_offloading_folder_size must be GiB, above 0, not "
                f"{self.kv_offloading_folder_size}"
            )
        refused = {
            "swap_space 0": self.swap_space == 0.0,
            "enable_prefix_caching off": not self.enable_prefix_caching,
            f"tensor_parallel_size {self.tensor_parallel_size}": self.tensor_parallel_size > 1,
            "a draft model": self.has_draft_model,
        }
        for name, wanted in refused.items():
            if wanted:
                raise ConfigError(
                    f"kv_offloading_folder does not support {name}: change it, or leave the folder "
                    "out"
                )

    def _check_parallel(self) -> None:
        if self.deterministic and self.tensor_parallel_size > 1:
            raise ConfigError(
                "deterministic is for one process, and tensor_parallel_size is "
                f"{self.tensor_parallel_size}: use 1, or switch deterministic off"
            )
        if self.tensor_parallel_size % self.nnodes:
            raise ConfigError(
                f"tensor_parallel_size {self.tensor_parallel_size} is not a multiple of nnodes "
                f"{self.nnodes}: it counts the processes of all nodes, as many on each"
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                f"node_rank must be 0 to {self.nnodes - 1}, since nnodes is {self.nnodes}, not "
                f"{self.node_rank}"
            )
        if not 1 <= self.node_timeout < inf:
            raise ConfigError(f"node_timeout must be 1 second or more, not {self.node_timeout}")

    def _check_lora(self) -> None:
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras must be at least max_loras ({self.max_loras}), not "
                f"{self.max_cpu_loras}"
            )
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("lora_modules are given, but enable_lora is off: switch it on")
