"""vLLM's arguments of `LLM` and `EngineArgs`: which have another name here, which values change
nothing, and what to use instead of the others.

docs/offline-api.md is generated from this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Renamed:
    """An argument that has another name here. `values` maps values that have other names too."""

    to: str
    values: Mapping[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class Fixed:
    """An argument of which only the `accepted` values are allowed, since Headrace does that anyway.

    `remedy` says what to use instead of another value.
    """

    accepted: tuple[Any, ...]
    remedy: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """An argument of which every value is accepted; `why` says why it changes nothing."""

    why: str


Meaning = Renamed | Fixed | Ignored

_OFF = (None, False)
NO_MEDIA = "only images and videos are supported"
_NO_FETCH = "images are given as PIL images or as data: URLs"
_TASKS = {
    "pooling": "embed",
    "embedding": "embed",
    None: "auto",
}
_GRAPHS = "CUDA graphs need no settings; enforce_eager=True switches them off"
_ONE_MACHINE = "use tensor_parallel_size, or several engines (headrace up --engines)"
_ROPE = "use hf_overrides"

VLLM_ARGUMENTS: Mapping[str, Meaning] = {
    "gpu_memory_utilization": Renamed("memory_utilization"),
    "kv_cache_memory_bytes": Renamed("kv_cache_bytes"),
    "num_gpu_blocks_override": Renamed("num_blocks"),
    "scheduling_policy": Renamed("policy"),
    "kv_offloading_size": Renamed("swap_space"),
    "override_pooler_config": Renamed("pooler_config"),
    "runner": Renamed("task", _TASKS),
    "trust_remote_code": Ignored(
        "a checkpoint's own code is never run; models that need it are refused when they load"
    ),
    "disable_log_stats": Ignored("statistics are always counted"),
    "disable_log_requests": Ignored("prompts are never logged"),
    "disable_custom_all_reduce": Ignored("there is no all-reduce of its own to disable"),
    "use_v2_block_manager": Ignored("there is one block manager"),
    "enable_chunked_prefill": Fixed((None, True), "prompts are always computed in chunks"),
    "max_seq_len_to_capture": Fixed((None,), _GRAPHS),
    "cuda_graph_sizes": Fixed((None,), _GRAPHS),
    "compilation_config": Fixed((None,), _GRAPHS),
    "tokenizer_mode": Fixed(
        ("auto", "hf"), "tokenizers are read from tokenizer.json: save it with transformers"
    ),
    "config_format": Fixed(("auto", "hf"), "models are read from config.json"),
    "pipeline_parallel_size": Fixed((None, 1), _ONE_MACHINE),
    "data_parallel_size": Fixed((None, 1), _ONE_MACHINE),
    "distributed_executor_backend": Fixed(
        (None, "mp", "uni"), "processes of one machine share a model, without Ray"
    ),
    "cpu_offload_gb": Fixed(
        (None, 0), "weights stay on the device: use quantization or tensor_parallel_size"
    ),
    "preemption_mode": Fixed((None,), "the engine measures whether to swap or to recompute"),
    "num_lookahead_slots": Fixed((None, 0), "use speculative_config"),
    "num_scheduler_steps": Fixed((None, 1), "leave it out: async_scheduling hides the scheduler"),
    "fully_sharded_loras": Fixed(_OFF, "leave it out"),
    "default_mm_loras": Fixed((None,), "name the adapter in lora_request"),
    "calculate_kv_scales": Fixed(_OFF, "scales come from the checkpoint"),
    "convert": Fixed((None, "auto", "none"), "use task='embed'"),
    "rope_scaling": Fixed((None,), _ROPE),
    "rope_theta": Fixed((None,), _ROPE),
    "hf_config_path": Fixed((None,), _ROPE),
    "hf_token": Fixed((None,), "set HF_TOKEN in the environment"),
    "download_dir": Fixed((None,), "set HF_HOME in the environment"),
    "code_revision": Fixed((None,), "a checkpoint's own code is never run"),
    "model_loader_extra_config": Fixed((None,), "leave it out"),
    "ignore_patterns": Fixed((None,), "only safetensors are downloaded"),
    "structured_outputs_config": Fixed((None,), "llguidance is always used; leave it out"),
    "guided_decoding_backend": Fixed(
        (None, "auto", "guidance"), "llguidance is always used; leave it out"
    ),
    "reasoning_parser": Fixed((None, ""), "gateways parse reasoning: headrace up"),
    "tool_call_parser": Fixed((None,), "gateways parse calls: headrace up"),
    "logits_processors": Fixed(
        (None,), "use logit_bias, allowed_token_ids, bad_words or structured_outputs"
    ),
    "logits_processor_pattern": Fixed((None,), "leave it out"),
    "enable_prompt_embeds": Fixed(_OFF, "send prompt or prompt_token_ids"),
    "enable_sleep_mode": Fixed(_OFF, "delete the LLM to free its memory"),
    "kv_transfer_config": Fixed((None,), "prefill and decode run in one engine"),
    "kv_events_config": Fixed((None,), "gateways place prompts by prefix without it"),
    "worker_cls": Fixed((None, "auto"), "leave it out"),
    "worker_extension_cls": Fixed((None, ""), "leave it out"),
    "scheduler_cls": Fixed((None,), "use policy"),
    "additional_config": Fixed((None,), "leave it out"),
    "otlp_traces_endpoint": Fixed((None,), "headrace engine traces; an LLM does not"),
    "collect_detailed_traces": Fixed((None,), "headrace engine traces; an LLM does not"),
    "mm_processor_kwargs": Fixed(
        (None,), "images are read as preprocessor_config.json says: leave it out"
    ),
    "allowed_local_media_path": Fixed((None, ""), _NO_FETCH),
    "allowed_media_domains": Fixed((None,), _NO_FETCH),
}

# vLLM's names of values of the engine's own arguments; the other values stay as they are.
VALUES: Mapping[str, Mapping[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto"},
    "task": _TASKS,
}

# Methods that vLLM's LLM has and Headrace's lacks, with what to use instead.
UNSUPPORTED_METHODS: Mapping[str, str] = {
    "classify": "classification heads are not supported",
    "reward": "reward models are not supported",
    "sleep": "delete the LLM to free its memory, and make a new one",
    "wake_up": "delete the LLM to free its memory, and make a new one",
    "collective_rpc": "make a new LLM with other arguments",
    "apply_model": "the model's modules are not part of the API",
    "set_tokenizer": "pass tokenizer to LLM(...)",
    "preprocess_chat": "use get_tokenizer().apply_chat_template",
}
