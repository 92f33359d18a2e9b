"""Compiles the kernels that engines launch on GPUs, before an engine starts.

    TRITON_CACHE_DIR=FOLDER python -m headrace_engine.compile_kernels MODEL ...

MODEL is one of SHAPES, a folder or a hub id. An engine of the model, with random weights, compiles
everything that its warm-up may measure and that a decode step launches. It needs the device, or
one that computes nothing: tests/support/null_cuda, as in the Dockerfile.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any

from headrace_common.sampling.params import SamplingParams
from headrace_common.text.checkpoint import local_source

from .autotune.start import tune
from .core.config import EngineConfig
from .model_loader.loader import place_model
from .offline.llm import LLM, TokensPrompt

LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,  # all layers are launched with the same kernels
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3: Mapping[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "intermediate_size": 12288,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
# The sizes of common models; fine-tuned models have the shapes of their base models.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-8b": LLAMA,
    "qwen3-8b": QWEN3,
    "qwen3-0.6b": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
}
PROMPT = TokensPrompt(prompt_token_ids=list(range(3, 40)))
KINDS = (
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, max_tokens=8, ignore_eos=True),
)


def main(models: list[str], say: Callable[[str], object] = print) -> int:
    """Prints a line of JSON for each model; returns the process's exit code."""
    if not models:
        say(f"name models: {', '.join(SHAPES)}, folders or hub ids")
        return 2
    for model in models:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            compile_for(_checkpoint(model, Path(folder)))
        say(json.dumps({"model": model, "seconds": round(time.perf_counter() - start, 1)}))
    return 0


def compile_for(model: str) -> None:
    """Compiles everything that an engine of `model` may launch with default settings. Raises
    ConfigError and CheckpointError."""
    options: dict[str, Any] = {"load_format": "dummy", "device": "cuda"}
    config = EngineConfig(model=model, **options)
    untuned = {**options, "enable_autotuner": False}
    tune(place_model(EngineConfig(model=model, **untuned)), config, budget=inf)
    llm = LLM(model, skip_tokenizer_init=True, **untuned)
    for kind in KINDS:
        llm.generate([PROMPT] * 3, kind, use_tqdm=False)


def _checkpoint(model: str, folder: Path) -> str:
    if model not in SHAPES:
        return local_source(model)
    (folder / "config.json").write_text(json.dumps(SHAPES[model]))
    return str(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
