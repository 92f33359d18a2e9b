"""vLLM's flags: those with the same name, others with the same meaning, and what to use instead.

docs/coming-from-vllm.md is generated from this table. A flag that Headrace does not have and that
the table does not know is refused as a misspelling.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import UsageError
from .flag import Arity, Flag, option
from .values import adapter, whole_number


@dataclass(frozen=True, slots=True)
class Same:
    """A flag of this name and meaning. `values` renames some values."""

    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Renamed:
    """Another name for the setting `to`. `difference` says how its meaning differs."""

    to: str
    arity: Arity = Arity.ONE
    values: Mapping[str, str] = field(default_factory=dict)
    difference: str = ""


@dataclass(frozen=True, slots=True)
class Needless:
    """A flag without effect.

    `why` says what Headrace does. If it has values, only these have no effect.
    """

    why: str
    arity: Arity = Arity.SWITCH
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Absent:
    """A flag that Headrace does not have. `remedy` says what to use."""

    remedy: str
    arity: Arity = Arity.ONE


Entry = Same | Renamed | Needless | Absent

_PROXY = "end TLS at a proxy or an ingress in front of the gateway"
_HUB_CACHE = "set HF_HOME, the hub's own variable"
_ONE_MACHINE = "run engines on each machine: they share one queue; docs/parallelism.md"
_GRAPHS = "sizes of CUDA graphs are chosen at the start"
_CONFIG_JSON = "change the checkpoint's config.json"
_NOT_LOGGED = "prompts and answers are never logged"
_SCHEDULER = "the scheduler does so where it helps"
_GRAMMARS = "grammars have one compiler"
_DRAFT = "use --speculative-config; docs/speculative-decoding.md"
_SWITCH = Arity.SWITCH

FLAGS: Mapping[str, Entry] = {
    # The model.
    "model": Same(),
    "revision": Same(),
    "served_model_name": Same(),
    "dtype": Same({"half": "float16", "float": "float32"}),
    "max_model_len": Same(),
    "quantization": Same({"awq_marlin": "awq", "gptq_marlin": "gptq", "None": "none"}),
    "q": Renamed("quantization", values={"awq_marlin": "awq", "gptq_marlin": "gptq"}),
    "task": Same({"embedding": "embed"}),
    "runner": Renamed("task", values={"pooling": "embed"}),
    "pooler_config": Same(),
    "override_pooler_config": Renamed("pooler_config"),
    "model_impl": Renamed("model_implementation", values={"vllm": "native"}),
    "trust_remote_code": Needless("code of checkpoints is never run"),
    "load_format": Needless("safetensors are read", Arity.ONE, ("auto", "safetensors")),
    "config_format": Needless("config.json is read", Arity.ONE, ("auto", "hf")),
    "tokenizer_mode": Needless("the fast tokenizer is used", Arity.ONE, ("auto", "hf")),
    "code_revision": Needless("code of checkpoints is never run", Arity.ONE),
    "tokenizer": Absent("put the tokenizer's files into the checkpoint's folder"),
    "tokenizer_revision": Absent("--revision also chooses the tokenizer"),
    "skip_tokenizer_init": Absent("the tokenizer is needed", _SWITCH),
    "download_dir": Absent(_HUB_CACHE),
    "hf_token": Absent("set HF_TOKEN, the hub's own variable"),
    "hf_config_path": Absent(_CONFIG_JSON),
    "hf_overrides": Absent(_CONFIG_JSON),
    "rope_scaling": Absent(_CONFIG_JSON),
    "rope_theta": Absent(_CONFIG_JSON),
    "generation_config": Absent("give sampling parameters in requests"),
    "override_generation_config": Absent("give sampling parameters in requests"),
    "seed": Absent("give `seed` in requests; without it each output is drawn anew"),
    "max_logprobs": Absent("requests may ask for up to 20"),
    "logits_processors": Absent("code of clients is not run", Arity.MANY),
    "limit_mm_per_prompt": Same(),
    "max_num_encoder_input_tokens": Same(),
    "mm_processor_kwargs": Absent("images are read as preprocessor_config.json says"),
    "allowed_local_media_path": Absent("images are not read from files of the server"),
    # The engine.
    "tensor_parallel_size": Same(),
    "tp": Renamed("tensor_parallel_size"),
    "nnodes": Same(),
    "node_rank": Same(),
    "master_addr": Same(),
    "master_port": Same(),
    "enable_expert_parallel": Same(),
    "block_size": Same(),
    "swap_space": Same(),
    "kv_cache_dtype": Same(),
    "max_num_seqs": Same(),
    "max_num_batched_tokens": Same(),
    "enable_prefix_caching": Same(),
    "enforce_eager": Same(),
    "async_scheduling": Same(),
    "device": Same(),
    "speculative_config": Same(),
    "disable_hybrid_kv_cache_manager": Same(),
    "attention_backend": Same({"FLASH_ATTN": "flash", "TRITON_ATTN": "triton"}),
    "gpu_memory_utilization": Renamed(
        "memory_utilization", difference="a share of the memory that the weights leave free"
    ),
    "kv_cache_memory_bytes": Renamed("kv_cache_memory"),
    "num_gpu_blocks_override": Renamed("num_blocks"),
    "kv_offloading_size": Renamed("swap_space"),
    "scheduling_policy": Renamed("policy"),
    "data_parallel_size": Renamed("engines"),
    "dp": Renamed("engines"),
    "api_server_count": Renamed("gateways"),
    "enable_chunked_prefill": Needless(_SCHEDULER),
    "long_prefill_token_threshold": Needless("--itl-target paces prompts", Arity.ONE),
    "max_num_partial_prefills": Needless(_SCHEDULER, Arity.ONE),
    "max_long_partial_prefills": Needless(_SCHEDULER, Arity.ONE),
    "num_scheduler_steps": Needless("--async-scheduling hides the scheduler's time", Arity.ONE),
    "use_v2_block_manager": Needless("there is one block manager"),
    "disable_custom_all_reduce": Needless("NCCL or gloo is used"),
    "disable_cascade_attn": Needless("there is no cascade attention"),
    "prefix_caching_hash_algo": Needless("blocks are compared by content", Arity.ONE),
    "max_seq_len_to_capture": Needless(_GRAPHS, Arity.ONE),
    "cuda_graph_sizes": Needless(_GRAPHS, Arity.MANY),
    "compilation_config": Needless("kernels are tuned at the start", Arity.ONE),
    "O": Needless("kernels are tuned at the start", Arity.ONE),
    "distributed_executor_backend": Needless("processes are used", Arity.ONE, ("mp", "uni")),
    "max_parallel_loading_workers": Needless("weights are mapped, not copied", Arity.ONE),
    "pipeline_parallel_size": Absent("use --tensor-parallel-size; docs/parallelism.md"),
    "pp": Absent("use --tensor-parallel-size; docs/parallelism.md"),
    "data_parallel_address": Absent(_ONE_MACHINE),
    "data_parallel_size_local": Absent(_ONE_MACHINE),
    "headless": Absent("nodes with --node-rank above 0 have no API; docs/parallelism.md", _SWITCH),
    "cpu_offload_gb": Absent("use --quantization, or --tensor-parallel-size for more GPUs"),
    "calculate_kv_scales": Absent("scales come from the checkpoint", _SWITCH),
    "kv_transfer_config": Absent("use --kv-role and --kv-offloading-folder; docs/memory.md"),
    "speculative_model": Absent(_DRAFT),
    "num_speculative_tokens": Absent(_DRAFT),
    # Adapters.
    "enable_lora": Same(),
    "lora_modules": Same(),
    "max_loras": Same(),
    "max_lora_rank": Same(),
    "max_cpu_loras": Same(),
    "lora_dtype": Needless("adapters have the model's dtype", Arity.ONE),
    "fully_sharded_loras": Absent("leave it out: adapters are split as the model is", _SWITCH),
    # The API.
    "host": Same(),
    "port": Same(),
    "chat_template": Same(),
    "tool_call_parser": Same(),
    "reasoning_parser": Same(),
    "allowed_origins": Same(),
    "uvicorn_log_level": Renamed(
        "log_level",
        values={
            "trace": "DEBUG",
            "debug": "DEBUG",
            "info": "INFO",
            "warning": "WARNING",
            "error": "ERROR",
            "critical": "ERROR",
        },
    ),
    "enable_auto_tool_choice": Needless("tools work where the chat template has them"),
    "enable_reasoning": Needless("reasoning is found by the chat template"),
    "chat_template_content_format": Needless("found from the template", Arity.ONE),
    "enable_prompt_tokens_details": Needless("answers have them"),
    "guided_decoding_backend": Needless(_GRAMMARS, Arity.ONE),
    "structured_outputs_config": Needless(_GRAMMARS, Arity.ONE),
    "enable_log_requests": Needless(_NOT_LOGGED),
    "disable_log_requests": Needless(_NOT_LOGGED),
    "max_log_len": Needless(_NOT_LOGGED, Arity.ONE),
    "disable_log_stats": Needless("figures are at /metrics"),
    "disable_uvicorn_access_log": Needless("requests are not logged one by one"),
    "disable_frontend_multiprocessing": Needless("gateways and engines are processes"),
    "enable_server_load_tracking": Needless("/metrics has the load"),
    "api_key": Absent(
        "use --api-keys-file FILE; `headrace keys create NAME --file FILE` makes a key", Arity.MANY
    ),
    "enable_force_include_usage": Absent("ask for stream_options.include_usage", _SWITCH),
    "return_tokens_as_token_ids": Absent("requests have return_token_ids", _SWITCH),
    "otlp_traces_endpoint": Absent("set OTEL_EXPORTER_OTLP_ENDPOINT"),
    "response_role": Absent("answers always have the role assistant"),
    "root_path": Absent("let the proxy in front of the gateway remove the prefix"),
    "middleware": Absent("use a proxy in front of the gateway"),
    "uds": Absent("use --host and --port"),
    "ssl_keyfile": Absent(_PROXY),
    "ssl_certfile": Absent(_PROXY),
    "ssl_ca_certs": Absent(_PROXY),
    "ssl_cert_reqs": Absent(_PROXY),
    "allow_credentials": Absent("keys are sent as headers, not as cookies", _SWITCH),
    "allowed_methods": Absent("the methods of the API are allowed"),
    "allowed_headers": Absent("the headers of the API are allowed"),
}


def arities() -> dict[str, Arity]:
    """How many values each flag has that Headrace does not have itself."""
    return {name: entry.arity for name, entry in FLAGS.items() if not isinstance(entry, Same)}


@dataclass(frozen=True, slots=True)
class Translation:
    """Headrace's flags, and sentences about those that were left out or mean something else."""

    flags: tuple[Flag, ...]
    notes: tuple[str, ...]


def translated(flags: Sequence[Flag]) -> Translation:
    """Headrace's flags for these flags, which may be vLLM's. Raises UsageError for absent ones."""
    found: list[Flag] = []
    notes: dict[str, None] = {}
    for flag in flags:
        entry = FLAGS.get(flag.name)
        match entry:
            case Absent():
                raise UsageError(f"there is no {flag.typed}", entry.remedy)
            case Needless() if not entry.values or flag.value in entry.values:
                notes[f"{flag.typed} has no effect: {entry.why}"] = None
            case Needless():
                allowed = " or ".join(entry.values)
                raise UsageError(f"{flag.typed} {flag.value}: {entry.why}", f"only {allowed}")
            case Renamed() | Same():
                name = entry.to if isinstance(entry, Renamed) else flag.name
                value = entry.values.get(flag.value, flag.value)
                found.append(Flag(name, _plain(name, value), flag.typed))
                if isinstance(entry, Renamed) and entry.difference:
                    notes[f"{flag.typed} is {option(name)}: {entry.difference}"] = None
            case None:
                found.append(flag)
    return Translation(tuple(found), tuple(notes))


def _plain(name: str, value: str) -> str:
    """The value without the short forms that vLLM takes."""
    if name in ("max_model_len", "max_num_batched_tokens", "kv_cache_memory"):
        return whole_number(value)
    return adapter(value) if name == "lora_modules" else value
